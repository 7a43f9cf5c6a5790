"""Count the collectives of a program: how often, over which axes, how many bytes, for which line of the
model.

A program can be read at three stages:

- its jaxpr (`llmpar.inspect.jaxpr`): what the author wrote, in the author's axes. It has no collectives where
  the partitioner decides;
- the text just after SPMD partitioning (`partitioned_hlo`, then `census_hlo`): what will be sent, with its
  true dtypes, nothing merged yet. Prefer this one;
- the final text (`compiled.as_text()`, then `census_hlo`): what this back end runs. The CPU widens bf16 to
  f32 and fp8 to f16 (see `to_apply=..._promoted`). It merges all-reduces of equal groups and, outside loops,
  a rematerialized gather with its first; nothing here undoes that. A cached text may name old lines.

`Compiled.cost_analysis` counts the body of a loop once; here a loop multiplies by its trip count. Not
counted: groups of one device (they send nothing), and what `Module.uncounted` names.
"""

import contextlib
import functools
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from llmpar.inspect.hlo import (
    CALLS,
    Instruction,
    Module,
    group_axes,
    integers,
    operand_arrow,
    parsed,
    shapes,
    values_bytes,
)
from llmpar.predict import formulas, ring


@dataclass(frozen=True)
class Collective:
    """State what one collective of a program sends in one step."""

    kind: str  # one of `hlo.COLLECTIVES`
    axes: tuple[str, ...]  # in mesh order; ('other',) where the groups follow no set of whole axes
    group_size: int
    count: int  # executions per step
    bytes_sent: int  # per device and step
    dtype: str  # as XLA writes it: f32, bf16, s32
    shape: tuple  # of the result of one execution; several shapes if it has several results
    source: str  # 'model/llama.py:88'; '' where the compiler names no line
    # in a branch; counted as if the branch that sends most were always taken
    conditional: bool = False
    # the model's arrow that it carries out (`collectives.scope`); '' where the partitioner chose
    arrow: str = ""
    # forward, backward or recomputed; '' outside all passes, as for gradients' sums
    direction: str = ""
    # its operand and result (`hlo.operand_arrow`): 'f32[8@X,4] -> f32[8,4]'; '' if unclear
    moves: str = ""
    # the loop with an unknown trip count that it is in: count and bytes of one iteration
    per_turn: str = ""
    place: tuple[str, str] = field(default=("", ""), compare=False)  # its computation and its name


def arrow_of(scope: str) -> dict[str, Any]:
    """Read ``arrow`` (the innermost) and ``direction`` of a `Collective` from an operation's named scopes.

    JAX names the pass: jvp is forward, its transpose backward, rematted_computation the forward pass again.
    A pipeline's F is not differentiated, so its scope counts as forward.
    """
    match = re.match(r".*arrow\[(.*?)\]", scope)
    marks = {
        "rematted_computation": "recomputed",
        "transpose(": "backward",
        "jvp(": "forward",
        "when-F/": "forward",
    }
    direction = next((name for mark, name in marks.items() if mark in scope), "")
    return {"arrow": match[1] if match else "", "direction": direction}


Taken = Mapping[str, Fraction]
"""How often the true branch of a cond under `jax.named_scope("when-NAME")` is taken."""
Work = list[tuple[Collective, Fraction]]
"""Collectives as they are when run once, and how often each is run."""


def collective_bytes(kind: str, group_size: int, result_bytes: int) -> int:
    """Return the bytes that one of g devices on a ring sends for a result of R bytes
    (`formulas.whole_ring_bytes`).

    All-gather and all-to-all R(g-1)/g, reduce-scatter R(g-1), all-reduce 2R(g-1)/g; collective-permute, send,
    and collective-broadcast (all devices but the last pass it on) R.
    """
    message_bytes = result_bytes * (group_size if kind == "reduce-scatter" else 1)
    return formulas.whole_ring_bytes(kind, message_bytes, group_size)


def summed(keyed: Iterable[tuple[dict[str, Any], Collective]]) -> list[dict[str, Any]]:
    """Sum counts and bytes of collectives with equal keys, into rows of key, ``count`` and ``bytes_sent``,
    the largest first."""
    rows: dict[tuple, dict[str, Any]] = {}
    for key, c in keyed:
        row = rows.setdefault(tuple(key.values()), key | {"count": 0, "bytes_sent": 0})
        row["count"] += c.count
        row["bytes_sent"] += c.bytes_sent
    return sorted(rows.values(), key=lambda row: -row["bytes_sent"])


def census_table(collectives: Iterable[Collective]) -> dict[tuple[str, str], dict[str, int]]:
    """Sum counts and bytes by axes (written 'dp,fsdp') and kind, to compare with another or a formula."""
    rows = summed(({"axis": ",".join(c.axes), "kind": c.kind}, _of_program(c)) for c in collectives)
    return {(row.pop("axis"), row.pop("kind")): row for row in rows}


def arrow_rows(collectives: Iterable[Collective]) -> list[dict[str, Any]]:
    """Sum counts and bytes by arrow, direction, axes and kind, the largest first: which line of the model
    sends what. The rows of one axis and kind add up to its row in `census_table`. Collectives without an
    arrow are summed by ``source``, their line ('' for those that the partitioner adds by itself)."""

    def key(c: Collective) -> dict[str, Any]:
        row = {"arrow": c.arrow, "direction": c.direction, "axis": ",".join(c.axes), "kind": c.kind}
        return row | {"source": "" if c.arrow else c.source}

    return summed((key(c), _of_program(c)) for c in collectives)


def _of_program(c: Collective) -> Collective:
    """Return a collective that a sum over the program may take. Refuse one known per iteration only."""
    known(None if c.per_turn else c.count, c.kind, c.per_turn)
    return c


def arrow_text(collectives: Iterable[Collective], most: int | None = None) -> str:
    """Write `arrow_rows` as lines of text, with their sum below; the rows after the first ``most`` as one."""
    rows = arrow_rows(collectives)
    cells = [
        (
            row["arrow"] or row["source"] or "(the partitioner's)",
            row["direction"],
            f"{row['axis']} {row['kind']}",
            f"×{row['count']}",
            f"{row['bytes_sent']:,} B",
        )
        for row in rows
    ]
    if rest := rows[most:] if most is not None else []:
        count, sent = (sum(row[name] for row in rest) for name in ("count", "bytes_sent"))
        cells[most:] = [(f"({len(rest)} more)", "", "", f"×{count}", f"{sent:,} B")]
    total = sum(row["bytes_sent"] for row in rows)
    return text_columns([*cells, ("in all", "", "", "", f"{total:,} B")])


def text_columns(cells: Sequence[tuple[str, ...]]) -> str:
    """Write rows of words as aligned columns; the last column, numbers, is aligned to the right."""
    *widths, last = [max(map(len, column)) for column in zip(*cells, strict=True)]
    line = "  ".join([*(f"{{:<{width}}}" for width in widths), f"{{:>{last}}}"])
    return "\n".join(line.format(*row) for row in cells)


def share_of(scope: str, taken: Taken | None) -> Fraction | None:
    """Return how often a cond's true branch is taken, by the name of its scope; None where it is unknown."""
    name = re.search(r"when-(\w+)\)*(?:/cond)?$", scope)
    return taken.get(name[1]) if taken and name else None


def weigh(branches: list[Work], scope: str, taken: Taken | None) -> Work:
    """Weigh two branches, false and true, by how often each is taken; if unknown, take the one that sends
    most, and what the others send no times."""
    if (share := share_of(scope, taken)) is not None:
        return repeat(branches[0], 1 - share) + repeat(branches[1], share)
    dearest = max(branches, key=lambda work: sum(c.bytes_sent * times for c, times in work))
    return [
        (replace(c, conditional=True), times if branch is dearest else Fraction(0))
        for branch in branches
        for c, times in branch
    ]


def repeat(work: Work, times: int | Fraction | None, source: str = "") -> Work:
    """Multiply the work of a loop's body by its trip count; if that is unknown, mark it as of one
    iteration."""
    if times is None:
        loop = lambda c: (c.per_turn and f"{c.per_turn} in ") + (source or "an unnamed line")
        return [(replace(c, per_turn=loop(c)), n) for c, n in work]
    return [(c, n * times) for c, n in work if times]


def known(trips: int | Fraction | None, what: str, source: str) -> int | Fraction:
    """Return the trip count of a loop that runs ``what``; raise ValueError if it is unknown."""
    if trips is None and what:
        loop = "the loop" + (source and f" at {source}")
        raise ValueError(
            f"cannot count {loop}: it runs {what}, but its trip count is unknown; use lax.scan, or"
            " lax.fori_loop with bounds that are Python integers"
        )
    return trips or 0


def all_runs(work: Work) -> list[Collective]:
    """Return the collectives with the counts and bytes of all their executions."""
    return [replace(c, count=int(times), bytes_sent=int(c.bytes_sent * times)) for c, times in work]


def census_hlo(text: str, mesh: Any, taken: Taken | None = None) -> list[Collective]:
    """Count the collectives of HLO text, partitioned or final, by the axes of `mesh` that groups span.

    A mesh is anything with `axis_names` and `shape`. Devices in the text are positions in the mesh in
    row-major order, whatever ids its devices have. Of an asynchronous pair the start is counted. In a loop
    whose trip count is unknown a collective is counted for one iteration. Raises ValueError for groups that
    do not cover the mesh.
    """
    module = parsed(text)

    def work(comp: str) -> Iterable[tuple[Collective, Fraction]]:
        for name, op in module.computations[comp].items():
            if op.opcode == "while":
                body = [pair for callee in op.called(*CALLS[op.opcode]) for pair in work(callee)]
                yield from repeat(body, module.trips(comp, op) if body else 0, module.source(op))
            elif op.opcode == "conditional":
                branches = op.called(*CALLS[op.opcode])
                yield from weigh([list(work(branch)) for branch in branches], op.scope, taken)
            elif op.opcode in CALLS:
                yield from work(op.called(*CALLS[op.opcode])[0])
            elif comp not in module.echoes and (one := collective(module, comp, name, mesh)):
                yield one, Fraction(1)

    return all_runs(list(work(module.entry)))


def collective(module: Module, comp: str, name: str, mesh: Any) -> Collective | None:
    """Read one operation as a collective that runs once; None for others and for groups of one device."""
    op = module.computations[comp][name]
    kind = op.collective
    axes, group_size = group_axes(op.attrs, mesh) if kind else ((), 1)
    if group_size == 1:
        return None
    results = op.results
    dtypes = ",".join(sorted({d for d, _ in results}))
    dims = tuple(shape for _, shape in results)
    sent = collective_bytes(kind, group_size, values_bytes(results))
    source = module.source(op)
    if not source or source.startswith("argument "):  # take the line of one that uses it
        users = (module.computations[comp][user] for user in module.users[comp, name])
        source = next(filter(None, map(module.source, users)), source)
    shape = dims[0] if len(dims) == 1 else dims
    moves = operand_arrow(module, comp, name, axes, mesh)
    seen = kind, axes, group_size, 1, sent, dtypes, shape, source
    return Collective(*seen, moves=moves, place=(comp, name), **arrow_of(op.scope))


def is_product(op: Instruction) -> bool:
    """Return whether an operation is a matmul: a `dot`, or a call of a GPU's library."""
    return (
        op.opcode == "dot"
        or op.opcode == "custom-call"
        and ("cublas" in op.attrs or "gemm" in op.attrs)
    )


def executed_flops(text: str, taken: Taken | None = None) -> int:
    """Count the FLOPs of every matmul that HLO text of CPUs or GPUs executes on a device, 2MNK each, but not
    those of kernels. Raises ValueError for loops with traced bounds (those over experts' overflow)."""
    module = Module(text)
    trips = lambda comp, loop: known(module.trips(comp, loop), "dot", module.source(loop))
    leaf = lambda comp, op: dot_flops(module, comp, op) if is_product(op) else 0
    return int(flops_in(module, leaf, trips, taken)(module.entry, None))


def flops_in(
    module: Module, leaf: Callable, trips: Callable, taken: Taken | None = None
) -> Callable:
    """Return a function that adds up the FLOPs of an operation of a computation, or of all of them (None):
    its own (``leaf``, called like it) or those of its callees, of a loop's body times ``trips``, of a branch
    by how often it is taken (the branch with most FLOPs, where that is unknown)."""

    def inside(comp: str, op: Instruction) -> Any:
        each = [flops(callee) for callee in op.called(*CALLS.get(op.opcode, ()))]
        if op.opcode == "while":
            return sum(each) * (trips(comp, op) if any(each) else 0)
        if op.opcode == "conditional":
            share = share_of(op.scope, taken)
            return max(each) if share is None else each[0] * (1 - share) + each[1] * share
        return each[0] if each else leaf(comp, op)

    @functools.cache
    def flops(comp: str) -> Any:
        return sum(inside(comp, op) for op in module.computations.get(comp, {}).values())

    return lambda comp, op: flops(comp) if op is None else inside(comp, op)


def dot_flops(module: Module, comp: str, op: Instruction) -> int:
    """Return the FLOPs of a matmul, or of a GPU library's call for one: 2MNK."""
    in_library = r'"lhs_contracting_dimensions":\s*\["(\d+)"'
    dims = op.called("lhs_contracting_dims") or re.findall(in_library, op.attrs)
    lhs = {str(i): n for i, n in enumerate(module.shape_of(comp, op, 0))}
    return 2 * math.prod(shapes(op.type)[0][1]) * math.prod(lhs[d] for d in dims)


def product_flops(module: Module, comp: str, op: Instruction) -> float:
    """Return the FLOPs of one operation's own matmuls, 2MNK each: dots, the convolutions that TPUs make of
    them, calls of GPU libraries, and attention kernels."""
    if is_product(op):
        return float(dot_flops(module, comp, op))
    count = _convolution_flops if op.opcode == "convolution" else call_flops
    return count(module, comp, op)


def _convolution_flops(module: Module, comp: str, op: Instruction) -> float:
    """Return the FLOPs of a matmul that the TPU compiler wrote as a convolution, ``bf_io->bf`` and the like.

    A dim of the window whose left side is dilated, or which slides over a padded kernel, stands for a batch
    or for rows: each output has one product there, however wide the window is.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attrs)
    if not labels:
        return 0.0
    kernel, result = module.shape_of(comp, op, 1), shapes(op.type)[0][1]
    left = module.shape_of(comp, op, 0)
    contracted = kernel[labels[2].index("i")]
    # a window over all of a dim that the result has no more is contracted too
    for spatial in "0123456789":
        if spatial in labels[1] and result[labels[3].index(spatial)] == 1:
            contracted *= min(left[labels[1].index(spatial)], kernel[labels[2].index(spatial)])
    return 2.0 * math.prod(result) * contracted


def call_flops(module: Module, comp: str, op: Instruction, seen: float = 1.0) -> float:
    """Return the FLOPs of an attention kernel, which is one call in the program; 0 for other operations.

    cuDNN's call has the shape: QK' and PV forward, five matmuls backward, half of them under a causal mask
    (Dao 2023, section 4.1). Of this package's own kernel the share ``seen`` of all pairs counts.
    """
    if op.opcode != "custom-call":
        return 0.0
    if "__cudnn$fmha" in op.attrs:
        dims = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[(.*?)\]', op.attrs)
        width = module.shape_of(comp, op, 0)[-1]
        each = 5 if "Backward" in op.attrs else 2
        pairs = math.prod(integers(dims[1])) if dims else 0
        return 2.0 * each * pairs * width * (0.5 if "CAUSAL" in op.attrs else 1.0)
    name = next((name for name in ring.PRODUCTS if name in op.scope), "")
    given = [module.shape_of(comp, op, i) for i in range(len(op.operands))] if name else []
    return ring.kernel_flops(name, given, seen) if name else 0.0


_CHEAP: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


def partitioned_hlo(lowered: Any) -> str:
    """Compile a program; return its HLO text just after SPMD partitioning: true dtypes, nothing combined.

    It costs a compilation without the persistent cache, which would skip the pass. A program for one device
    is not partitioned: then the text is the one before optimizations.
    """
    return read_program(lowered)[1]


def read_program(lowered: Any, platform: str = "") -> tuple[Any, str]:
    """Compile a lowered program once, and return the executable and the text of `partitioned_hlo`.
    ``platform`` is the one that it is compiled for, if not that of JAX's own devices.

    On CPUs the executable's machine code is not optimized, which saves a third of the time; its HLO and
    memory are the same. Memory that the compiler has freed is returned to the system, so several programs
    fit.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    platform = platform or jax.default_backend()
    _give_back()
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    compilation_cache.reset_cache()  # JAX decides once whether to use the cache, until a reset
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            dump: dict[str, Any] = {
                "xla_dump_to": folder,
                "xla_dump_hlo_pass_re": "spmd-partitioning",
            }
            compiled = lowered.compile(dump | (_CHEAP if platform == "cpu" else {}))
            wanted = re.compile(r"\.(after_(tpu-)?spmd-partitioning|before_optimizations)\.")
            files = [f for f in Path(folder).glob("*.txt") if wanted.search(f.name)]
            latest = max(files, key=lambda f: (".after_" in f.name, f.stat().st_size))
            return compiled, latest.read_text()
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
        _give_back()


def _give_back() -> None:
    """Return freed memory back to the system. glibc keeps it otherwise: 0.3 GB behind a small Llama."""
    import ctypes  # a page has none

    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def compiled_memory(compiled: Any) -> dict[str, int]:
    """Return a device's bytes as the compiler plans them; peak is their sum, the alias counted once.

    Temporaries are those that the compiler reserves. A TPU's compiler reports more than its heap has: there
    they are what is alive at the fullest moment besides arguments and results, a few hundredths less than
    the heap (and its part on the chip). The CPU's own peak lacks temporaries.
    """
    from llmpar.parallel._jax import program_shardings

    stats: Any = compiled.memory_analysis()
    names = "argument", "output", "alias", "temp"
    memory = {f"{name}_bytes": getattr(stats, f"{name}_size_in_bytes") for name in names}
    rest = memory["argument_bytes"] + memory["output_bytes"] - memory["alias_bytes"]
    shardings = (pair[1] for part in program_shardings(compiled) for pair in part if pair)
    if "tpu" in {device.platform for sharding in shardings for device in sharding.device_set}:
        memory["temp_bytes"] = stats.peak_memory_in_bytes - rest
    return memory | {"peak_bytes": rest + memory["temp_bytes"]}
