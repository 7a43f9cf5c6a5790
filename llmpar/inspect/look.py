"""Look at any JAX program: what it sends and holds, line by line, in the axis names of its author."""

import contextlib
import functools
import itertools
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from html import escape
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

from llmpar import draw
from llmpar.draw.scene import Scene, size_text
from llmpar.inspect import pins
from llmpar.inspect.census import (
    Collective,
    census_hlo,
    collective,
    compiled_memory,
    flops_in,
    read_program,
    summed,
    text_columns,
)
from llmpar.inspect.explain import explain
from llmpar.inspect.hlo import CALLS, Instruction, Module, integers, parsed, short_dtype, typed
from llmpar.inspect.jaxpr import LOOPS, kept_lines, unchecked
from llmpar.inspect.links import axis_links
from llmpar.inspect.reshard import cheaper
from llmpar.inspect.roofline import product_flops
from llmpar.inspect.shardings import PACKED, _leaves
from llmpar.parallel.mesh import axes_of, platform_of

_SMALL = 0.01
"""Replicated values below this share of the arguments are summed into one row."""
_HIDDEN = r'(?:^(?=convolution)|custom_call_target="(?!Sharding|SPMD|xla\.sdy|annotate_|__cublas))([^"\s]+)'
_MOST = 8
"""How many results with another layout than their argument are named."""
_STAGES = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled
_WHOLE = (
    "a jaxpr has no shardings on automatic axes: its arguments are whole here; look at the function"
    " instead"
)
LAST = (
    "the compiler may have merged, split and widened collectives here, and a text from its cache may name old"
    " lines; look at the function instead"
)


@dataclass(frozen=True, repr=False)
class Look:
    """State what one run of a program does on each device; bytes are those of one device.

    Attributes:
        rows: what each line sends, largest first: ``source``, ``arrow`` (the types of operand and result,
            whole along ``axes``: ``f32[64@X,128] -> f32[64,128]``), ``collective``, ``axes``, ``count``,
            ``bytes_sent``, ``per_turn`` (the loop around it whose trip count is unknown: count and bytes are
            those of one iteration; or ''), ``conditional`` (in the branch that sends most), ``link``,
            ``dtype``, ``shape`` (of the result), ``direction``.
        memory: argument, output, alias, temp and peak bytes, as the compiler reserves them; {} for a text.
        replicated: values that are equal on several devices although ``axes`` could cut them: ``bytes`` of
            each, and the bytes ``saved`` by the cut.
        unordered: pairs of collectives without a data dependency between them.
        notes: what could not be read, and why.
        cheaper: the reshards that send less by another sequence of moves (`reshard.cheaper`): ``source``,
            ``count``, ``bytes_sent`` and ``instead_of`` as both are compiled, ``expression``.
    """

    name: str
    mesh: dict[str, int]
    rows: list[dict[str, Any]]
    memory: dict[str, int]
    flops: int
    replicated: list[dict[str, Any]]
    unordered: list[tuple[str, str]]
    links: dict[str, str]
    notes: list[str]
    cheaper: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        on = " ".join(f"{a}={n}" for a, n in self.mesh.items()) or "one device"
        words = [f"{self.name} on {on} sends, per device and run:", self._sent()]
        if not self.rows:
            partly = any(re.match("not counted: .* sends$", text) for text in self.notes)
            words = [f"{self.name} on {on} sends nothing" + (" that is counted" if partly else "")]
        for row in self.cheaper:
            less, sent = f"{row['bytes_sent']:,} B", f"{row['instead_of']:,} B"
            words.append(f"cheaper: {row['source']}  {row['expression']}  {less}, not {sent}")
        if loops := sorted({row["per_turn"] for row in self.rows} - {""}):
            words.append(
                f"the trip count of the loop at {', '.join(loops)} is unknown: not in the sum"
            )
        for link in dict.fromkeys(self.links.values()):
            words.append(
                f"{', '.join(a for a, other in self.links.items() if other == link)}: {link}"
            )
        if sizes := [f"{name[:-6]} {size_text(n)}" for name, n in self.memory.items()]:
            words.append(f"memory: {', '.join(sizes)}")
        words.append(f"matmuls: {self.flops:,} FLOPs")
        for row in self.replicated:
            over = f" could be cut over {', '.join(row['axes'])}:" if row["axes"] else ""
            size, saved = size_text(row["bytes"]), size_text(row["saved"])
            words.append(f"replicated: {row['name']}, {size};{over} {saved} less")
        for a, b in self.unordered[:1]:
            words.append(f"no data dependency orders {a} and {b} (pairs: {len(self.unordered)})")
        return "\n".join(words + [f"note: {text}" for text in self.notes])

    __repr__ = __str__

    def _sent(self) -> str:
        """Write the rows as aligned text, with the sum of those whose loops have a known trip count."""
        sent = sum(row["bytes_sent"] for row in self.rows if not row["per_turn"])
        rows = [*pins.words_of(self.rows), ("in all", "", "", "", "", f"{sent:,} B")]
        passes = any(row["direction"] for row in self.rows)
        return text_columns([(*words[:3], *words[3:4] * passes, *words[4:]) for words in rows])

    def pin(self, file: str | os.PathLike) -> "Look":
        """Keep what is sent in a file: written the first time, compared afterwards.

        Raises AssertionError, line by line, where the program sends otherwise. With the environment variable
        ``LLMPAR_UPDATE_PINS=1`` the file is written anew; with ``CI`` a missing file fails.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        pins.check_pin(self.name, self.mesh, pins.words_of(self.rows), file)
        return self

    def bytes_of(self, what: str, over: str | None = None) -> int:
        """Return what a device sends by a collective ("all-reduce") or in a move ("f32[8@X] -> f32[8]"), of
        all axes or ``over`` one. Raises ValueError for what no program has, so that no assertion holds by a
        misspelt word."""
        rows = pins.matching(self.mesh, self.rows, what, over)
        return sum(row["bytes_sent"] for row in rows)

    def sends(
        self,
        what: str,
        over: str | None = None,
        at_most: float = math.inf,
        fails_on: "Look | None" = None,
    ) -> "Look":
        """Assert that something is sent (`bytes_of`), and at most so many bytes. ``fails_on``: a look at a
        program of which that is false, to show that the assertion can fail."""
        __tracebackhide__ = True
        rows = pins.matching(self.mesh, self.rows, what, over)
        if at_most < math.inf and any(row["per_turn"] for row in rows):
            raise ValueError(
                f"{what} is in a loop of unknown trip count, and its bytes are of one iteration;"
                " leave at_most out, or give the loop a known length"
            )
        holds = lambda look: 1 <= look.bytes_of(what, over) <= at_most
        return self._assert(f"sends('{what}')", what, over, holds, fails_on)

    def forbids(self, what: str, over: str | None = None, fails_on: "Look | None" = None) -> "Look":
        """Assert that nothing is sent so (`bytes_of`), in no branch, and by no groups that fill no whole
        axes. ``fails_on`` as for `sends`."""
        __tracebackhide__ = True
        holds = lambda look: not pins.matching(look.mesh, look.rows, what, over, partly=True)
        return self._assert(f"forbids('{what}')", what, over, holds, fails_on)

    def _assert(
        self, name: str, what: str, over: str | None, holds: Callable, fails_on: Any
    ) -> "Look":
        """Raise AssertionError unless something holds of this look, and does not of ``fails_on``."""
        __tracebackhide__ = True
        if not holds(self):
            raise AssertionError(
                f"{name} fails: {self.name} sends {self.bytes_of(what, over):,} B by"
                f" {what}{f' over {over}' * bool(over)}\n{self}"
            )
        if fails_on and holds(fails_on):
            raise AssertionError(f"{name} holds of fails_on too, so it shows nothing")
        return self

    def __sub__(self, other: "Look") -> pins.Difference:
        """Return what this program sends otherwise than another."""
        return pins.difference(pins.words_of(other.rows), pins.words_of(self.rows))

    def markdown(self) -> str:
        """Write the rows as a table in GitHub's Markdown, for a comment."""
        return pins.markdown(pins.words_of(self.rows))

    def document(self) -> dict[str, Any]:
        """Return the look as plain data, for JSON."""
        return asdict(self)

    def picture(self) -> Scene:
        """Draw the bytes of each line."""
        name = lambda row: f"{row['source'] or '(the partitioner)'} {row['arrow']}".strip()
        more = lambda row: {
            "arrow": name(row),
            "axis": ",".join(row["axes"]),
            "kind": row["collective"],
        }
        return draw.arrows_sent([row | more(row) for row in self.rows])

    def _repr_html_(self) -> str:
        text = f'<pre style="font-family: monospace; line-height: 1.3">{escape(str(self))}</pre>'
        return text + (self.picture()._repr_svg_() if self.rows else "")


def look(f: Any, /, *args: Any, **kwargs: Any) -> Look:
    """Return what a JAX program sends and holds. The program is compiled, and does not run.

    Args:
        f: a function, jitted or not; a `jax.stages.Traced`, `Lowered` or `Compiled`; a jaxpr; or HLO text,
            with its mesh as the one argument: a mesh, a dict, or "X=4 Y=2".
        args: f's arguments: arrays or `jax.ShapeDtypeStruct`s, whose shardings name the devices. Arguments
            without an array are static where f is not jitted.
        kwargs: f's keyword arguments.

    Raises:
        ValueError: f is none of these, or its arguments are on two meshes, or the mesh does not fit the text.
            JAX's own sharding errors carry the sentence of `llmpar.explain` as a note.
    """
    if isinstance(f, str):
        return _of_text(f, *args, **kwargs)
    try:
        context = jax.sharding.get_mesh()
    except ValueError:  # inside jax.jit
        raise ValueError(
            "look compiles, and another program is being traced; call it outside"
        ) from None
    notes, lines = [_WHOLE] if hasattr(f, "eqns") else [], dict[str, set[str]]()
    jaxpr: Any = None
    try:
        program = _staged(f, args, kwargs)
        meshes = [*_meshes("the context", context), *_meshes("", args, kwargs)]
        if isinstance(program, jax.stages.Traced | core.ClosedJaxpr):
            meshes += _meshes("the program", jaxpr := program.jaxpr)
            lines, notes = kept_lines(jaxpr), notes + unchecked(jaxpr)
            program = _lowered(program, _one(meshes))
        if isinstance(program, jax.stages.Compiled):
            compiled, text, meshes = program, program.as_text() or "", []
        else:
            mesh = _one(meshes)
            compiled, text = read_program(program, platform_of(mesh) if mesh else "")
    except Exception as error:
        if sentence := explain(error):
            error.add_note(f"llmpar: {sentence}")
        raise
    memory = compiled_memory(compiled)
    leaves = [leaf for leaf in _leaves(compiled) if hasattr(leaf[1], "shape")]  # tokens have none
    mesh = _one([*meshes, *(pair for name, _, where in leaves for pair in _meshes(name, where))])
    result = _read(text, mesh, notes + _returned(leaves), lines)
    name = (
        type(f).__name__
        if result.name in ("", "_unnamed_function", "jaxpr_as_fun")
        else result.name
    )
    more = _replicated(leaves, mesh, memory["argument_bytes"])
    given = [where for path, _, where in leaves if re.match(r"in (?!captured)", path)]
    ways = cheaper(jaxpr, given, mesh, result.rows) if jaxpr and isinstance(mesh, Mesh) else []
    return replace(result, name=name, memory=memory, replicated=more, cheaper=ways)


def _returned(leaves: list) -> list[str]:
    """Note the results that have another layout than the argument of the same path, shape and dtype."""
    within, type_of = lambda path: re.sub(r"^\[\d+\]\.?", "", path), lambda x: (x.shape, x.dtype)
    known, notes = [leaf for leaf in leaves if leaf[2] is not None], list[str]()
    given = [(name[3:], x, where) for name, x, where in known if name.startswith("in ")]
    for name, x, where in (leaf for leaf in known if leaf[0].startswith("out ")):
        path, like = name[4:], [one for one in given if type_of(one[1]) == type_of(x)]
        same = [one for one in like if one[0] == path]
        same = same or [
            one for one in like if within(one[0]) and within(one[0]) in (path, within(path))
        ]
        if len(same) != 1 or (at := same[0][2]).device_set != where.device_set:
            continue
        if not where.is_equivalent_to(at, len(x.shape)):
            notes.append(
                f"{name} is returned as {_layout(where, x)}, but in {same[0][0]} is"
                f" {_layout(at, x)}: passed in again, it is moved, or the program is compiled again"
            )
    if (more := len(notes) - _MOST) > 0:
        notes[_MOST:] = [f"{more} more results are returned in another layout"]
    return notes


def _layout(where: Any, x: Any) -> str:
    """Write an array's type as JAX does; of a sharding without a spec the shape of its blocks."""
    if (spec := getattr(where, "spec", None)) is None:
        return f"blocks of {list(where.shard_shape(x.shape))}"
    return typed(short_dtype(str(x.dtype)), x.shape, dict(enumerate(map(axes_of, spec))))


def _staged(f: Any, args: tuple, kwargs: dict) -> Any:
    """Return a closed jaxpr, or a program of `jax.stages`, traced if it can be."""
    wraps = "traced", "lowered", "compiled"  # the attributes of Flax and Equinox for JAX's own
    inner = lambda x: next(
        (y for y in (getattr(x, n, None) for n in wraps) if isinstance(y, _STAGES)), x
    )
    if hasattr(f, "eqns"):
        return f if hasattr(f, "consts") else core.ClosedJaxpr(f, ())
    if isinstance(f := inner(f), _STAGES):
        if args or kwargs:
            raise ValueError(
                f"a {type(f).__name__.lower()} program has its arguments; call look(program) alone"
            )
        return f
    if not callable(f):
        raise ValueError(
            "look takes a function with its arguments, a traced, lowered or compiled program, a"
            f" jaxpr, or HLO text; this is of type {type(f).__name__}"
        )
    # a jitted method: its function has the attributes
    if hasattr(getattr(f, "__func__", None), "lower"):
        f, args = f.__func__, (f.__self__, *args)
    plain = lambda x: (
        isinstance(x, Hashable) and not any(hasattr(y, "dtype") for y in jax.tree.leaves(x))
    )
    numbers, names = (
        [i for i, x in enumerate(args) if plain(x)],
        [k for k, x in kwargs.items() if plain(x)],
    )
    jitted = f if hasattr(f, "lower") else jax.jit(f, static_argnums=numbers, static_argnames=names)
    return inner(getattr(jitted, "trace", jitted.lower)(*args, **kwargs))


def _lowered(program: Any, mesh: Any) -> jax.stages.Lowered:
    """Lower a traced program, or a jaxpr with the shardings of its types. A mesh without devices gets
    JAX's."""
    if isinstance(program, jax.stages.Traced):
        try:
            return program.lower()
        except ValueError:  # JAX asks for devices
            if not isinstance(mesh, AbstractMesh):
                raise
            program = program.jaxpr
    if isinstance(mesh, AbstractMesh):
        if mesh.size > (present := jax.device_count()):
            raise ValueError(
                f"mesh {dict(mesh.shape)} needs {mesh.size} devices, but JAX has {present};"
                f" llmpar.use_devices({mesh.size}) simulates them, in a fresh process"
            )
        grid = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
        mesh = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        given = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in program.in_avals
        ]
        return jax.jit(core.jaxpr_as_fun(program)).lower(*given)


def _meshes(name: str, *tree: Any) -> Iterator[tuple[str, Any]]:
    """List the meshes of arrays, types, shardings, meshes and jaxprs in a tree, each with the name of its
    place."""
    for path, x in jax.tree.leaves_with_path(tree):
        if hasattr(x, "eqns"):
            inner, consts = getattr(x, "jaxpr", x), getattr(x, "consts", ())
            types = [v.aval for eqn in inner.eqns for v in eqn.outvars]
            yield from _meshes(name, consts, [v.aval for v in inner.invars], types)
            yield from (pair for e in inner.eqns for pair in _meshes(e.primitive.name, e.params))
        mesh = (
            x
            if isinstance(x, Mesh | AbstractMesh)
            else getattr(getattr(x, "sharding", x), "mesh", None)
        )
        if isinstance(mesh, Mesh | AbstractMesh) and mesh.size > 1:
            yield name or f"argument {jax.tree_util.keystr(path[1:])}", mesh


def _one(meshes: Iterable[tuple[str, Any]]) -> Any:
    """Return the one mesh of a program, with devices if any of them has devices; None if there is none."""
    places: dict[tuple, tuple[str, Any]] = {}
    for name, mesh in meshes:
        devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
        places.setdefault(((*mesh.shape.items(),), devices), (name, mesh))
    placed = {sizes for sizes, devices in places if devices}
    (a, mesh), *others = [x for (sizes, on), x in places.items() if on or sizes not in placed] or [
        ("", None)
    ]
    for b, other in others:
        text = f"{a} has mesh {dict(mesh.shape)}, {b} has mesh {dict(other.shape)}"
        text += " of other devices" * (mesh.shape == other.shape)
        raise ValueError(
            f"a table has the axes of one mesh, but {text}; use one, or look at each part"
        )
    return mesh


def _of_text(text: str, mesh: Any = None) -> Look:
    """Look at HLO text, whose devices are positions in ``mesh``; raise ValueError if the mesh does not
    fit."""
    if isinstance(mesh, str):
        mesh = {axis: int(n) for axis, n in re.findall(r"(\w+)\s*[=:]\s*(\d+)", mesh)}
    sizes, devices = dict(getattr(mesh, "shape", mesh) or {}), parsed(text).devices
    if (n := math.prod(sizes.values())) != devices:
        has = f"mesh {sizes} has {n} devices" if sizes else "a text does not name its mesh"
        raise ValueError(
            f"{has}, and the program has {devices}; give its own: look(text, 'X=4 Y=2')"
        )
    places = (
        mesh if isinstance(mesh, Mesh) else SimpleNamespace(axis_names=tuple(sizes), shape=sizes)
    )
    result = _read(text, places, [], {})
    for row in (row for row in result.rows if row["axes"] == ("other",)):
        raise ValueError(
            f"mesh {sizes} is not the program's: groups of the {row['collective']} at"
            f" {row['source'] or 'no line'} fill no whole axes; give its own, or an axis of which"
            " they fill a part as two: X=4 as A=2 B=2"
        )
    return result


def _read(text: str, mesh: Any, notes: list[str], lines: dict[str, set[str]]) -> Look:
    """Read the text of a program. ``lines`` is what `kept_lines` returns, or {} where there is no jaxpr."""
    module = parsed(text)
    notes = [*notes, LAST] if "is_scheduled=true" in text[: text.find("\n")] else [*notes]
    if module.devices == 1:
        mesh = None
    elif mesh is None:
        mesh = SimpleNamespace(axis_names=("device",), shape={"device": module.devices})
        notes.append(f"no mesh was found: all {module.devices} devices are one axis here")
    between = (
        {a: row["link"] for a, row in axis_links(mesh).items()} if isinstance(mesh, Mesh) else {}
    )
    keyed = list[tuple[dict[str, Any], Collective]]()
    for c in census_hlo(text, mesh) if mesh else []:
        source, others = _line(c.source, lines)
        if others is not None:
            other = " or ".join(sorted(others)) or "another of this program"
            notes.append(
                f"{source} may stand for {other}: JAX reuses what it traced, with its first lines"
            )
        if c.axes == ("other",):
            groups = f"groups of the {c.kind} at {source or 'no line'} fill no whole axes"
            notes.append(groups + (c.moves and f": they are {c.moves}"))
        link = "; ".join(dict.fromkeys(between[a] for a in c.axes if a in between))
        key: dict[str, Any] = {
            "source": source,
            "arrow": c.arrow or c.moves,
            "collective": c.kind,
            "axes": c.axes,
            "per_turn": c.per_turn,
            "conditional": c.conditional,
            "link": link,
        }
        keyed.append((key | {"dtype": c.dtype, "shape": c.shape, "direction": c.direction}, c))
    flops, uncounted = _matmul_flops(module)
    ops = (f"{op.opcode} {op.attrs}" for ops in module.computations.values() for op in ops.values())
    hidden = Counter(name for op in ops for name in re.findall(_HIDDEN, op))
    uncounted += [f"not counted: what {name} (×{n}) does inside" for name, n in hidden.items()]
    label = lambda c: (
        f"{_line(c.source, lines)[0] or '(the partitioner)'} {c.kind} {','.join(c.axes)}"
    )
    pairs = dict.fromkeys((label(a), label(b)) for a, b in (unordered(text, mesh) if mesh else []))
    name, sizes = re.sub("^_lambda_?$", "<lambda>", module.name), dict(mesh.shape) if mesh else {}
    notes = [*dict.fromkeys(notes + uncounted + module.uncounted)]
    return Look(name, sizes, summed(keyed), {}, flops, [], [*pairs], between, notes)


def _line(line: str, lines: dict[str, set[str]]) -> tuple[str, set[str] | None]:
    """Return the line for which a line of the text stands by `kept_lines`. Where that is not clear, return
    the line itself, and the others for which it may stand."""
    if not lines or not line or line.startswith("argument "):
        return line, None
    meant = lines[LOOPS] if line in lines[LOOPS] else lines.get(line, lines[LOOPS])
    return (min(meant), None) if len(meant) == 1 else (line, meant - {line})


def _matmul_flops(module: Module) -> tuple[int, list[str]]:
    """Count the FLOPs of a program's matmuls, and note the loops whose trip count is unknown."""
    notes = list[str]()

    def trips(comp: str, loop: Instruction) -> int:
        count, where = module.trips(comp, loop), module.source(loop) or "no line"
        if count is None:
            notes.append(
                f"the trip count of the loop at {where} is unknown: its FLOPs are of one iteration"
            )
        return 1 if count is None else count

    leaf = lambda comp, op: 0 if op.opcode == "convolution" else product_flops(module, comp, op)
    return int(flops_in(module, leaf, trips)(module.entry, None)), notes


def _replicated(leaves: list, mesh: Any, argument_bytes: int) -> list[dict[str, Any]]:
    """List the values that could be cut over axes along which they are equal; small ones as one row."""
    rows = list[dict[str, Any]]()
    for name, x, where in leaves if isinstance(mesh, Mesh) else ():
        unfinished = getattr(getattr(where, "spec", None), "unreduced", None)
        if where is None or unfinished or where.device_set != {*mesh.devices.flat}:
            continue
        blocks = where.devices_indices_map(x.shape)
        block_of = np.array([str(blocks[d]) for d in mesh.devices.flat]).reshape(mesh.devices.shape)
        used = [
            a for i, a in enumerate(mesh.axis_names) if (block_of != block_of.take([0], i)).any()
        ]
        shard, axes = list(where.shard_shape(x.shape)), list[str]()
        size = PACKED.get(str(x.dtype), x.dtype.itemsize)
        local_bytes = int(size * math.prod(shard))
        for axis, n in mesh.shape.items():
            dim = next((i for i, size in enumerate(shard) if size % n == 0), None)
            if dim is not None and n > 1 and local_bytes and axis not in used:
                shard[dim] //= n
                axes.append(axis)
        row = {"name": name, "shape": tuple(x.shape), "bytes": local_bytes, "axes": tuple(axes)}
        rows += [row | {"saved": local_bytes - int(size * math.prod(shard))}] if axes else []
    of = lambda row: (row["shape"], row["axes"])
    state = [of(row) for row in rows if row["name"].startswith("in")]  # the state is also a result
    rows = [row for row in rows if row["name"].startswith("in") or of(row) not in state]
    small = [row for row in rows if row["bytes"] < _SMALL * argument_bytes]
    if len(small) > 1:
        rows = [row for row in rows if row not in small]
        both: dict[str, Any] = {key: sum(row[key] for row in small) for key in ("bytes", "saved")}
        rows.append({"name": f"{len(small)} small ones", "shape": (), "axes": ()} | both)
    return sorted(rows, key=lambda row: -row["saved"])


_Pair = tuple[Collective, Collective]


def unordered(text: str, mesh: Any, one_channel: bool = False) -> list[_Pair]:
    """List the pairs of collectives in HLO text without a data dependency between them: two devices may run
    them in different orders. With ``one_channel`` only pairs that simulated devices may take for one another:
    of one channel, one of them in a loop or a branch that the other is not in."""
    module, pairs = parsed(text), list[_Pair]()

    @functools.cache
    def inside(comp: str) -> list[tuple[Collective, list[int], bool]]:
        """Return a computation's collectives, their channels, and whether they are in its loops or
        branches."""
        before = dict[str, int]()  # operation -> the positions that it follows, as bits
        earlier = dict[int, list]()  # position -> its collectives
        for place, (name, op) in enumerate(module.computations[comp].items()):
            waits = re.findall(r"control-predecessors=\{(.*?)\}", op.attrs)
            after = re.findall(r"[\w.\-]+", " ".join(waits)) + [value for value, _ in op.operands]
            needs = [n for n in after if n in before]
            before[name] = (
                functools.reduce(operator.or_, (before[n] for n in needs), 0) | 1 << place
            )
            callees = op.called(*CALLS[op.opcode]) if op.opcode in CALLS else []
            collectives = [
                (c, n, True) for i in callees if i in module.computations for c, n, _ in inside(i)
            ]
            if one := collective(module, comp, name, mesh):
                collectives.append((one, integers(op.attrs, "channel_id="), False))
            if not collectives:
                continue
            loose = [
                c for i, others in earlier.items() if not before[name] >> i & 1 for c in others
            ]
            for (a, one_of, a_deep), (b, other_of, b_deep) in itertools.product(loose, collectives):
                if not one_channel or one_of == other_of and (a_deep or b_deep):
                    pairs.append((a, b))
            earlier[place] = collectives
        return [c for collectives in earlier.values() for c in collectives]

    inside(module.entry)
    return pairs
