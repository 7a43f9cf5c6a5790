"""Look at any JAX program: what it sends, holds and lacks, line by line, in the axis names of its author."""

import contextlib
import functools
import itertools
import math
import operator
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from html import escape
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh

from llmpar import draw
from llmpar.draw.scene import Scene, size_text
from llmpar.inspect.census import (
    Collective,
    census_hlo,
    collective,
    compiled_memory,
    flops_in,
    read_program,
    text_columns,
)
from llmpar.inspect.explain import cut_as, explain
from llmpar.inspect.hlo import CALLS, Instruction, integers, parsed
from llmpar.inspect.jaxpr import LOOPS, kept_lines, unchecked
from llmpar.inspect.links import axis_links
from llmpar.inspect.roofline import product_flops
from llmpar.inspect.shardings import PACKED, _leaves
from llmpar.parallel.mesh import axes_of, platform_of

_SMALL = 0.01
"""Of what is replicated, values below this share of the arguments are summed."""
_HIDDEN = r'(?:^(?=convolution)|custom_call_target="(?!Sharding|SPMD|xla\.sdy|annotate_|__cublas))([^"\s]+)'
_MOST = 8
"""Of leaves that come back in another layout so many are named."""
_STAGES = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled
_WHOLE = "a jaxpr does not say how arguments on automatic axes lie: here they are whole; look at the function"
LAST = (
    "the compiler may have merged, split and widened collectives here, and from its cache comes a text that"
    " names old lines; look at the function"
)


@dataclass(frozen=True, repr=False)
class Look:
    """Hold what one run of a program does on each device; bytes are those of one device.

    Attributes:
        rows: what each line sends, largest first: ``source``, ``arrow`` (dims lettered by place, without the
            axes that stay), ``collective``, ``axes``, ``count``, ``bytes_sent``, ``per_turn`` (the loop of
            whose turns nobody knows the number: count and bytes are of one; or ''), ``conditional`` (in the
            branch that sends most), ``link``, ``dtype``, ``shape`` (of the result), ``direction``.
        memory: argument, output, alias, temp and peak bytes, as the compiler reserves them; {} of a text.
        replicated: what devices hold alike although ``axes`` could cut it: ``bytes`` each, and ``saved``.
        unordered: pairs of collectives that no data orders.
        notes: what could not be read, and why.
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

    def __str__(self) -> str:
        on = " ".join(f"{a}={n}" for a, n in self.mesh.items()) or "one device"
        cells = [
            (
                row["source"] or "(the partitioner's)",
                row["arrow"],
                f"{row['collective']} {','.join(row['axes'])}",
                f"×{row['count']:,}" + " a turn" * bool(row["per_turn"]) + " at most" * row["conditional"],
                f"{row['bytes_sent']:,} B",
            )
            for row in self.rows
        ]
        sent = sum(row["bytes_sent"] for row in self.rows if not row["per_turn"])
        cells.append(("in all", "", "", "", f"{sent:,} B"))
        said = [f"{self.name} on {on} sends, per device and run:", text_columns(cells)]
        more = any(re.match("not counted: .* sends$", text) for text in self.notes)
        said = said if self.rows else [f"{self.name} on {on} sends nothing" + " that is counted" * more]
        if turns := sorted({row["per_turn"] for row in self.rows} - {""}):
            said.append(f"nobody knows how many turns the loop at {', '.join(turns)} has: not in the sum")
        for link in dict.fromkeys(self.links.values()):
            said.append(f"{', '.join(a for a, other in self.links.items() if other == link)}: {link}")
        held = ", ".join(f"{name[:-6]} {size_text(n)}" for name, n in self.memory.items())
        said += [f"memory: {held}"] * bool(held) + [f"products: {self.flops:,} FLOPs"]
        for row in self.replicated:
            over = f" could be cut over {', '.join(row['axes'])}:" * bool(row["axes"])
            sizes = [size_text(row[key]) for key in ("bytes", "saved")]
            said.append(f"replicated: {row['name']}, {sizes[0]};{over} {sizes[1]} less")
        for a, b in self.unordered[:1]:
            said.append(f"no data orders {a} and {b} (pairs: {len(self.unordered)})")
        return "\n".join(said + [f"note: {text}" for text in self.notes])

    __repr__ = __str__

    def document(self) -> dict[str, Any]:
        """Return it as plain data, for JSON."""
        return asdict(self)

    def picture(self) -> Scene:
        """Draw the bytes of each line."""
        name = lambda row: f"{row['source'] or '(the partitioner)'} {row['arrow']}".strip()
        more = lambda row: {"arrow": name(row), "axis": ",".join(row["axes"]), "kind": row["collective"]}
        return draw.arrows_sent([row | more(row) for row in self.rows])

    def _repr_html_(self) -> str:
        text = f'<pre style="font-family: monospace; line-height: 1.3">{escape(str(self))}</pre>'
        return text + (self.picture()._repr_svg_() if self.rows else "")


def look(f: Any, /, *args: Any, **kwargs: Any) -> Look:
    """Says what a JAX program sends, holds and lacks. It is compiled, and does not run.

    Args:
        f: a function, jitted or not; a `jax.stages.Traced`, `Lowered` or `Compiled`; a jaxpr; or HLO text,
            with its mesh as the one argument: a mesh, a dict, or "X=4 Y=2".
        args: f's own: arrays or `jax.ShapeDtypeStruct`s, whose shardings say on which devices. What has no
            array in it, a function that is not jitted gets as it is.
        kwargs: f's own too.

    Raises:
        ValueError: it is none of these, or lies on two meshes, or the mesh does not fit the text. JAX's own
            errors of shardings carry a note: what `llmpar.explain` says of them.
    """
    if isinstance(f, str):
        return _of_text(f, *args, **kwargs)
    try:
        context = jax.sharding.get_mesh()
    except ValueError:  # inside jax.jit
        raise ValueError("look compiles, and another program is being traced; call it outside") from None
    notes, lines = [_WHOLE] * hasattr(f, "eqns"), dict[str, set[str]]()
    try:
        program = _staged(f, args, kwargs)
        meshes = [*_meshes("the context", context), *_meshes("", args, kwargs)]
        if isinstance(program, jax.stages.Traced | core.ClosedJaxpr):
            meshes += _meshes("the program", program.jaxpr)
            lines, notes = kept_lines(program.jaxpr), notes + unchecked(program.jaxpr)
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
    name = type(f).__name__ if result.name in ("", "_unnamed_function", "jaxpr_as_fun") else result.name
    more = _replicated(leaves, mesh, memory["argument_bytes"])
    return replace(result, name=name, memory=memory, replicated=more)


def _returned(leaves: list) -> list[str]:
    """Note leaves of a state, by their paths, that come back in another layout than they went in."""
    within, type_of = lambda path: re.sub(r"^\[\d+\]\.?", "", path), lambda x: (x.shape, x.dtype)
    known, notes = [leaf for leaf in leaves if leaf[2] is not None], list[str]()
    given = [(name[3:], x, where) for name, x, where in known if name.startswith("in ")]
    for name, x, where in (leaf for leaf in known if leaf[0].startswith("out ")):
        path, like = name[4:], [one for one in given if type_of(one[1]) == type_of(x)]
        same = [one for one in like if one[0] == path]
        same = same or [one for one in like if within(one[0]) and within(one[0]) in (path, within(path))]
        if len(same) != 1 or (at := same[0][2]).device_set != where.device_set:
            continue
        if not where.is_equivalent_to(at, len(x.shape)):
            lie = f"{name} comes back as {_lies(where, x)}, in {same[0][0]} went in as {_lies(at, x)}"
            notes.append(f"{lie}: given again, it moves, or the program is compiled again")
    more = [f"{len(notes) - _MOST} more results come back in another layout"] * (len(notes) > _MOST)
    return notes[:_MOST] + more


def _lies(where: Any, x: Any) -> str:
    """A layout in words; of a sharding without a spec the shape of a block."""
    if (spec := getattr(where, "spec", None)) is None:
        return f"blocks of {list(where.shard_shape(x.shape))}"
    return f"'{cut_as([axes_of(cut) for cut in (*spec, *[None] * (len(x.shape) - len(spec)))])}'"


def _staged(f: Any, args: tuple, kwargs: dict) -> Any:
    """Return a closed jaxpr, or a program as `jax.stages` have it, traced if it can be."""
    wraps = "traced", "lowered", "compiled"  # so Flax and Equinox call what JAX has
    inner = lambda x: next((y for y in (getattr(x, n, None) for n in wraps) if isinstance(y, _STAGES)), x)
    if hasattr(f, "eqns"):
        return f if hasattr(f, "consts") else core.ClosedJaxpr(f, ())
    if isinstance(f := inner(f), _STAGES):
        if args or kwargs:
            raise ValueError(f"a {type(f).__name__.lower()} program has its arguments; give look only that")
        return f
    if not callable(f):
        kinds = "a function with its arguments, a traced, lowered or compiled program, a jaxpr, or HLO text"
        raise ValueError(f"look takes {kinds}; this is of type {type(f).__name__}")
    if hasattr(getattr(f, "__func__", None), "lower"):  # a jitted method; what it has is its function's
        f, args = f.__func__, (f.__self__, *args)
    plain = lambda x: isinstance(x, Hashable) and not any(hasattr(y, "dtype") for y in jax.tree.leaves(x))
    numbers, names = [i for i, x in enumerate(args) if plain(x)], [k for k, x in kwargs.items() if plain(x)]
    jitted = f if hasattr(f, "lower") else jax.jit(f, static_argnums=numbers, static_argnames=names)
    return inner(getattr(jitted, "trace", jitted.lower)(*args, **kwargs))


def _lowered(program: Any, mesh: Any) -> jax.stages.Lowered:
    """Lower what was traced, or a jaxpr as its types say. A mesh without devices gets those here."""
    if isinstance(program, jax.stages.Traced):
        try:
            return program.lower()
        except ValueError:  # JAX asks for devices
            if not isinstance(mesh, AbstractMesh):
                raise
            program = program.jaxpr
    if isinstance(mesh, AbstractMesh):
        if mesh.size > (present := jax.device_count()):
            why = f"mesh {dict(mesh.shape)} has no devices, and of {mesh.size} only {present} are here"
            raise ValueError(f"{why}; llmpar.use_devices({mesh.size}) simulates them, in a fresh process")
        grid = np.array(jax.devices()[: mesh.size]).reshape(mesh.axis_sizes)
        mesh = Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        given = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in program.in_avals]
        return jax.jit(core.jaxpr_as_fun(program)).lower(*given)


def _meshes(name: str, *tree: Any) -> Iterator[tuple[str, Any]]:
    """List the meshes of arrays, types, shardings, meshes and jaxprs in a tree, each with who names it."""
    for path, x in jax.tree.leaves_with_path(tree):
        if hasattr(x, "eqns"):
            inner, consts = getattr(x, "jaxpr", x), getattr(x, "consts", ())
            types = [v.aval for eqn in inner.eqns for v in eqn.outvars]
            yield from _meshes(name, consts, [v.aval for v in inner.invars], types)
            yield from (pair for e in inner.eqns for pair in _meshes(e.primitive.name, e.params))
        mesh = x if isinstance(x, Mesh | AbstractMesh) else getattr(getattr(x, "sharding", x), "mesh", None)
        if isinstance(mesh, Mesh | AbstractMesh) and mesh.size > 1:
            yield name or f"argument {jax.tree_util.keystr(path[1:])}", mesh


def _one(meshes: Iterable[tuple[str, Any]]) -> Any:
    """Return the one mesh of a program, with devices if any of them has; None if there is none."""
    places: dict[tuple, tuple[str, Any]] = {}
    for name, mesh in meshes:
        devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
        places.setdefault(((*mesh.shape.items(),), devices), (name, mesh))
    placed = {sizes for sizes, devices in places if devices}
    (a, mesh), *others = [x for (sizes, on), x in places.items() if on or sizes not in placed] or [("", None)]
    for b, other in others:
        text = f"{a} has mesh {dict(mesh.shape)}, {b} has mesh {dict(other.shape)}"
        text += " of other devices" * (mesh.shape == other.shape)
        raise ValueError(f"one table has the axes of one mesh, but {text}; use one, or look at each part")
    return mesh


def _of_text(text: str, mesh: Any = None) -> Look:
    """Look at HLO text, whose devices are positions in ``mesh``. Refuses a mesh that does not fit it."""
    if isinstance(mesh, str):
        mesh = {axis: int(n) for axis, n in re.findall(r"(\w+)\s*[=:]\s*(\d+)", mesh)}
    sizes, devices = dict(getattr(mesh, "shape", mesh) or {}), parsed(text).devices
    if (n := math.prod(sizes.values())) != devices:
        has = f"mesh {sizes} has {n} devices" if sizes else "a text does not name its mesh"
        raise ValueError(f"{has}, and the program has {devices}; give its own: look(text, 'X=4 Y=2')")
    places = mesh if isinstance(mesh, Mesh) else SimpleNamespace(axis_names=tuple(sizes), shape=sizes)
    result = _read(text, places, [], {})
    for row in (row for row in result.rows if row["axes"] == ("other",)):
        why = f"groups of the {row['collective']} at {row['source'] or 'no line'} fill no whole axes"
        remedy = "give its own, or an axis of which they fill a part as two: X=4 as A=2 B=2"
        raise ValueError(f"mesh {sizes} is not the program's: {why}; {remedy}")
    return result


def _read(text: str, mesh: Any, notes: list[str], lines: dict[str, set[str]]) -> Look:
    """Read what text says. ``lines`` are what `kept_lines` gives, if anything is known."""
    loops, real = lines.get(LOOPS, set()), lambda line: lines and line and not line.startswith("argument ")
    kept = lambda line: loops if line in loops else lines.get(line, loops)
    meant = lambda c: kept(c.source) if real(c.source) else {c.source}
    at = lambda c: min(meant(c)) if len(meant(c)) == 1 else c.source
    module, notes = parsed(text), notes + [LAST] * ("is_scheduled=true" in text[: text.find("\n")])
    if module.devices == 1:
        mesh = None
    elif mesh is None:
        mesh = SimpleNamespace(axis_names=("device",), shape={"device": module.devices})
        notes = [*notes, f"no mesh was found: all {module.devices} devices are one axis here"]
    between = {a: row["link"] for a, row in axis_links(mesh).items()} if isinstance(mesh, Mesh) else {}
    rows = dict[tuple, dict[str, Any]]()
    for c in census_hlo(text, mesh) if mesh else []:
        if len(meant(c)) != 1:
            other = " or ".join(sorted(meant(c) - {c.source})) or "another of this program"
            notes = [*notes, f"{c.source} may stand for {other}: JAX keeps lines with what it makes of them"]
        c = replace(c, source=at(c))
        link = "; ".join(dict.fromkeys(between[a] for a in c.axes if a in between))
        what: dict[str, Any] = {"source": c.source, "arrow": c.arrow or c.moves, "collective": c.kind}
        what |= {"axes": c.axes, "per_turn": c.per_turn, "conditional": c.conditional, "link": link}
        what |= {"dtype": c.dtype, "shape": c.shape, "direction": c.direction}
        row = rows.setdefault(tuple(what.values()), what | {"count": 0, "bytes_sent": 0})
        row["count"] += c.count
        row["bytes_sent"] += c.bytes_sent
        other = f"groups of the {c.kind} at {c.source or 'no line'} fill no whole axes"
        other += c.moves and f": they are {c.moves}"
        notes = notes + [other] * (c.axes == ("other",))

    def turns(comp: str, loop: Instruction) -> int:
        trips, where = module.trips(comp, loop), module.source(loop) or "no line"
        notes.extend([f"of the loop at {where} FLOPs are those of one turn"] * (trips is None))
        return 1 if trips is None else trips

    leaf = lambda comp, op: 0 if op.opcode == "convolution" else product_flops(module, comp, op)
    flops = int(flops_in(module, leaf, turns)(module.entry, None))
    inner = (f"{op.opcode} {op.attrs}" for ops in module.computations.values() for op in ops.values())
    hidden = Counter(name for words in inner for name in re.findall(_HIDDEN, words))
    notes += [f"not counted: what {name} (×{n}) does inside" for name, n in hidden.items()] + module.uncounted
    label = lambda c: f"{at(c) or '(the partitioner)'} {c.kind} {','.join(c.axes)}"
    pairs = dict.fromkeys((label(a), label(b)) for a, b in (unordered(text, mesh) if mesh else []))
    name, sizes = re.sub("^_lambda_?$", "<lambda>", module.name), dict(mesh.shape) if mesh else {}
    ordered = sorted(rows.values(), key=lambda row: -row["bytes_sent"])
    return Look(name, sizes, ordered, {}, flops, [], [*pairs], between, [*dict.fromkeys(notes)])


def _replicated(leaves: list, mesh: Any, argument_bytes: int) -> list[dict[str, Any]]:
    """List what could be cut over axes along which devices hold the same; what is small as one row."""
    rows = list[dict[str, Any]]()
    for name, x, where in leaves if isinstance(mesh, Mesh) else ():
        unfinished = getattr(getattr(where, "spec", None), "unreduced", None)
        if where is None or unfinished or where.device_set != {*mesh.devices.flat}:
            continue
        blocks = where.devices_indices_map(x.shape)
        lies = np.array([str(blocks[d]) for d in mesh.devices.flat]).reshape(mesh.devices.shape)
        used = [a for i, a in enumerate(mesh.axis_names) if (lies != lies.take([0], i)).any()]
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
    state = [of(row) for row in rows if row["name"].startswith("in")]  # which comes out again
    rows = [row for row in rows if row["name"].startswith("in") or of(row) not in state]
    small = [row for row in rows if row["bytes"] < _SMALL * argument_bytes]
    if len(small) > 1:
        rows = [row for row in rows if row not in small]
        both: dict[str, Any] = {key: sum(row[key] for row in small) for key in ("bytes", "saved")}
        rows.append({"name": f"{len(small)} small ones", "shape": (), "axes": ()} | both)
    return sorted(rows, key=lambda row: -row["saved"])


_Pair = tuple[Collective, Collective]


def unordered(text: str, mesh: Any, one_channel: bool = False) -> list[_Pair]:
    """List the pairs of collectives in HLO text that no path of data orders: one device may enter them in
    either order while another does the opposite. With ``one_channel`` only those that simulated devices may
    take for one another: of one channel, one of them in a loop or a branch that the other is not in."""
    module, pairs = parsed(text), list[_Pair]()

    @functools.cache
    def inside(comp: str) -> list[tuple[Collective, list[int], bool]]:
        """A computation's collectives, their channels, and whether they are in a loop or branch of it."""
        before, earlier = (
            dict[str, int](),
            dict[int, list](),
        )  # sets of places as bits; place to what is there
        # an operand stands before its users
        for place, (name, op) in enumerate(module.computations[comp].items()):
            waits = re.findall(r"control-predecessors=\{(.*?)\}", op.attrs)
            after = re.findall(r"[\w.\-]+", " ".join(waits)) + [value for value, _ in op.operands]
            needs = [n for n in after if n in before]
            before[name] = functools.reduce(operator.or_, (before[n] for n in needs), 0) | 1 << place
            callees = op.called(*CALLS[op.opcode]) if op.opcode in CALLS else []
            collectives = [(c, n, True) for i in callees if i in module.computations for c, n, _ in inside(i)]
            if one := collective(module, comp, name, mesh):
                collectives.append((one, integers(op.attrs, "channel_id="), False))
            if not collectives:
                continue
            loose = [c for other, theirs in earlier.items() if not before[name] >> other & 1 for c in theirs]
            for (a, one_of, a_deep), (b, other_of, b_deep) in itertools.product(loose, collectives):
                if not one_channel or one_of == other_of and (a_deep or b_deep):
                    pairs.append((a, b))
            earlier[place] = collectives
        return [c for collectives in earlier.values() for c in collectives]

    inside(module.entry)
    return pairs
