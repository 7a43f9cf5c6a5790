"""Look at any JAX program: what it sends and holds, line by line, in the axis names of its author."""

import contextlib
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from llmpar.inspect.census import compiled_memory, read_program
from llmpar.inspect.explain import noted
from llmpar.inspect.hlo import innermost, short_dtype, typed
from llmpar.inspect.jaxpr import kept_lines, unchecked
from llmpar.inspect.links import axis_links
from llmpar.inspect.profile import measure_rows
from llmpar.inspect.reshard import cheaper
from llmpar.inspect.schedule import read_schedule
from llmpar.inspect.sent import Look, _line, look_at_text, read_look
from llmpar.inspect.shardings import PACKED, _leaves
from llmpar.inspect.transfers import transfers
from llmpar.parallel.mesh import axes_of, platform_of
from llmpar.plan.two_meshes import TwoMeshes

# Replicated values below this share of the arguments are summed into one row.
_SMALL = 0.01
# How many results with another layout than their argument are named.
_MOST = 8
_LEAST = 0.8  # of the bytes are left by a cure, or fewer
_MORE = 1.1  # of memory and FLOPs are needed with it at the most: with more, devices repeat each other's work
# Programs that are compiled for it, in their order; as many more if none of the likely ones helps.
_PROGRAMS = 24
# More of each, of the names next to the line that sends most: a scan's body may come late.
_NEAR = 8
_LIBRARIES = r"/(site|dist)-packages/|/lib/python3|^<frozen|^" + re.escape(
    os.path.dirname(os.path.dirname(__file__))
)
_Place = tuple[str, int, str]  # the file and the line that name a value, and its name
_new = itertools.count()
_STAGES = jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled
_WHOLE = (
    "a jaxpr has no shardings on automatic axes: its arguments are whole here; look at the function"
    " instead"
)
_NO_CURE = (
    "a cure is for functions of arrays on automatic axes, with loops of known trip counts, that send"
    " the same when they are traced again; leave out the cure"
)
_NO_LINE = "no line that fixes the layout of one value leaves four fifths of the bytes or fewer"


def look(
    f: Any,
    /,
    *args: Any,
    dims: Mapping[str, Any] | None = None,
    trace: str | os.PathLike | None = None,
    cure: bool = False,
    **kwargs: Any,
) -> Look:
    """Return what a JAX program sends and holds. The program is compiled, and does not run.

    Args:
        f: a function, jitted or not; a `jax.stages.Traced`, `Lowered` or `Compiled`; a jaxpr; or HLO text,
            with its mesh as the one argument: a mesh, a dict, or "X=4 Y=2".
        args: f's arguments: arrays or `jax.ShapeDtypeStruct`s, whose shardings name the devices. Arguments
            without an array are static where f is not jitted.
        dims: a letter for each dim of arguments, by the argument's name: ``{"x": "b s d", "params": {"up":
            "d m"}}``, or ``"params['up']"`` as JAX names it. Moves are then written in these letters,
            ``d m +X -> d m``, where it is certain which dims they move, and as JAX's types elsewhere.
        trace: a folder that `jax.profiler.trace` wrote while the program ran: rows get the ``measured`` times
            of `profile.measure_rows`.
        cure: find the line that fixes a layout with which the program sends least (`find_cure`); for it up to
            66 programs are traced and compiled.
        kwargs: f's keyword arguments.

    Raises:
        ValueError: f is none of these, or its arguments are on two meshes, or the mesh does not fit the text,
            or letters do not fit an argument.
            JAX's own sharding errors carry the sentence of `llmpar.explain` as a note.
    """
    letters = {
        f"{name}{jax.tree_util.keystr(path)}": words
        for name, tree in (dims or {}).items()
        for path, words in jax.tree.leaves_with_path(tree)
    }
    if isinstance(f, str) and cure:
        raise ValueError(_NO_CURE)
    if isinstance(f, str):
        given = (*args, *kwargs.values(), None)[0]
        result = look_at_text(f, given, _links(given), letters)
        return _as_it_runs(result, f, given, {}, trace)
    try:
        context = jax.sharding.get_mesh()
    except ValueError:  # inside jax.jit
        raise ValueError(
            "look compiles, and another program is being traced; call it outside"
        ) from None
    notes = [_WHOLE] if hasattr(f, "eqns") else []
    lines = dict[str, set[str]]()
    jaxpr: Any = None
    with noted():
        is_mover = isinstance(getattr(f, "plan", None), TwoMeshes)
        program = f if is_mover else _staged(f, args, kwargs)
        if between := transfers(program, (args, kwargs)):
            if cure:
                raise ValueError(_NO_CURE)
            return between
        meshes = [*meshes_in("the context", context), *meshes_in("", args, kwargs)]
        if isinstance(program, jax.stages.Traced | core.ClosedJaxpr):
            meshes += meshes_in("the program", jaxpr := program.jaxpr)
            lines, notes = kept_lines(jaxpr), notes + unchecked(jaxpr)
            program = _lowered(program, _one(meshes))
        if isinstance(program, jax.stages.Compiled):
            compiled, text, meshes = program, program.as_text() or "", []
        else:
            mesh = _one(meshes)
            compiled, text = read_program(program, platform_of(mesh) if mesh else "")
    memory = compiled_memory(compiled)
    leaves = [leaf for leaf in _leaves(compiled) if hasattr(leaf[1], "shape")]  # tokens have none
    mesh = _one([*meshes, *(pair for name, _, where in leaves for pair in meshes_in(name, where))])
    result = read_look(text, mesh, notes + _returned(leaves), lines, _links(mesh), letters)
    name = (
        type(f).__name__
        if result.name in ("", "_unnamed_function", "jaxpr_as_fun")
        else result.name
    )
    more = _replicated(leaves, mesh, memory["argument_bytes"])
    given = [where for path, _, where in leaves if re.match(r"in (?!captured)", path)]
    ways = cheaper(jaxpr, given, mesh, result.rows) if jaxpr and isinstance(mesh, Mesh) else []
    result = replace(result, name=name, memory=memory, replicated=more, cheaper=ways)
    if cure:
        line = find_cure(f, args, kwargs, result, mesh, compiled)
        result = replace(result, cure=line, notes=result.notes + [_NO_LINE] * (not line))
    return _as_it_runs(result, compiled.as_text() or "", mesh, lines, trace)


def _as_it_runs(result: Look, text: str, mesh: Any, lines: dict[str, set[str]], trace: Any) -> Look:
    """Add a compiled program's schedule to a look, and what a profile in the folder ``trace`` measured."""
    if not isinstance(mesh, Mesh):
        mesh = SimpleNamespace(axis_names=(*result.mesh,), shape=result.mesh)
    line_of = lambda source: _line(source, lines)[0]
    result = replace(result, schedule=read_schedule(text, mesh, line_of))
    if trace is None:
        return result
    return replace(
        result, notes=result.notes + measure_rows(result.rows, text, mesh, trace, line_of)
    )


def _links(mesh: Any) -> dict[str, str]:
    """Return the link of each axis of a mesh of devices."""
    return {a: row["link"] for a, row in axis_links(mesh).items()} if isinstance(mesh, Mesh) else {}


def _returned(leaves: list) -> list[str]:
    """Note the results that have another layout than the argument of the same path, shape and dtype."""
    within = lambda path: re.sub(r"^\[\d+\]\.?", "", path)
    type_of = lambda x: (x.shape, x.dtype)
    known = [leaf for leaf in leaves if leaf[2] is not None]
    notes = list[str]()
    given = [(name[3:], x, where) for name, x, where in known if name.startswith("in ")]
    for name, x, where in (leaf for leaf in known if leaf[0].startswith("out ")):
        path = name[4:]
        like = [one for one in given if type_of(one[1]) == type_of(x)]
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

    def inner(x: Any) -> Any:
        """Return JAX's own program in one of Flax's or Equinox's."""
        own = (getattr(x, name, None) for name in ("traced", "lowered", "compiled"))
        return next((y for y in own if isinstance(y, _STAGES)), x)

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
    numbers = [i for i, x in enumerate(args) if plain(x)]
    names = [k for k, x in kwargs.items() if plain(x)]
    jitted = f if hasattr(f, "lower") else jax.jit(f, static_argnums=numbers, static_argnames=names)
    return inner(getattr(jitted, "trace", jitted.lower)(*args, **kwargs))


def on_arrays(f: Any, args: tuple, kwargs: dict) -> Callable[..., Any]:
    """Return f as a function of the arrays among its arguments."""
    leaves, tree = jax.tree.flatten((args, kwargs))

    def call(*arrays: Any) -> Any:
        rest = iter(arrays)
        filled = [next(rest) if hasattr(x, "dtype") else x for x in leaves]
        given, named = jax.tree.unflatten(tree, filled)
        return f(*given, **named)

    return call


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


def meshes_in(name: str, *tree: Any) -> Iterator[tuple[str, Any]]:
    """List the meshes of arrays, types, shardings, meshes and jaxprs in a tree, each with the name of its
    place."""
    for path, x in jax.tree.leaves_with_path(tree):
        if hasattr(x, "eqns"):
            inner, consts = getattr(x, "jaxpr", x), getattr(x, "consts", ())
            types = [v.aval for eqn in inner.eqns for v in eqn.outvars]
            yield from meshes_in(name, consts, [v.aval for v in inner.invars], types)
            yield from (pair for e in inner.eqns for pair in meshes_in(e.primitive.name, e.params))
        mesh = getattr(getattr(x, "sharding", x), "mesh", x)
        if isinstance(mesh, Mesh | AbstractMesh) and mesh.size > 1:
            yield name or f"argument {jax.tree_util.keystr(path[1:])}", mesh


def _one(meshes: Iterable[tuple[str, Any]]) -> Any:
    """Return the one mesh of a program, with devices if any of them has devices; None if there is none."""
    places: dict[tuple, tuple[str, Any]] = {}
    for name, mesh in meshes:
        devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
        places.setdefault(((*mesh.shape.items(),), devices), (name, mesh))
    placed = {sizes for sizes, devices in places if devices}
    left = [x for (sizes, on), x in places.items() if on or sizes not in placed]
    (a, mesh), *others = left or [("", None)]
    for b, other in others:
        text = f"{a} has mesh {dict(mesh.shape)}, {b} has mesh {dict(other.shape)}"
        text += " of other devices" * (mesh.shape == other.shape)
        raise ValueError(
            f"a table has the axes of one mesh, but {text}; use one, or look at each part"
        )
    return mesh


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


# --------------------------------------------------------------------------------- a line that fixes a layout


def find_cure(
    f: Any, args: tuple, kwargs: dict, seen: Look, mesh: Any, program: jax.stages.Compiled
) -> dict[str, Any]:
    """Find the line with which a program sends least: ``source`` (the line that it follows), ``expression``,
    and, as compiled, ``bytes_sent``, ``instead_of``, ``peak_bytes``; {} if none helps.

    Where no line fixes the layout of a value, XLA's partitioner chooses it, and later lines follow; no text
    shows which line is the cause. So values that the author's code names get other layouts, one at a time:
    the function is traced with that line in it, and compiled. The line that is returned leaves four fifths of
    the bytes or fewer, also where results keep the layouts of ``program``, with as much memory and as many
    FLOPs up to a tenth. ``seen`` is the look at it.

    Raises ValueError where the program cannot be traced so.
    """
    f = getattr(f, "__wrapped__", f) if hasattr(f, "lower") else f
    arrays = [x for x in jax.tree.leaves((args, kwargs)) if hasattr(x, "dtype")]
    values, call = dict[_Place, Any](), on_arrays(f, args, kwargs)
    sum_of = lambda look: sum(row["bytes_sent"] for row in look.rows)

    def compiled(specs: dict[_Place, NamedSharding], **options: Any) -> Look:
        jitted = jax.jit(lambda *arrays: call(*arrays), **options)
        # JAX keeps what it traced before, but not under another name
        with _written(specs, values), set_xla_metadata(llmpar=str(next(_new))):
            return look(jitted, *arrays)

    def helped(option: tuple[_Place, PartitionSpec], like: Any = None) -> Look | None:
        with contextlib.suppress(Exception):  # JAX refuses a layout in many words
            options = {"out_shardings": like.output_shardings} if like else {}
            now = compiled({option[0]: NamedSharding(mesh, option[1])}, **options)
            more = (now.flops, seen.flops), (now.memory["peak_bytes"], seen.memory["peak_bytes"])
            if sum_of(now) < _LEAST * sum_of(seen) and all(n <= _MORE * m for n, m in more):
                return now
        return None

    is_auto = isinstance(mesh, Mesh) and {*mesh.axis_types} == {AxisType.Auto}
    is_known = (
        is_auto
        and callable(f)
        and not isinstance(f, _STAGES)
        and not any(row["per_turn"] for row in seen.rows)
    )
    if not is_known or sum_of(compiled({})) != sum_of(seen):
        raise ValueError(_NO_CURE)
    most = max(seen.rows, key=lambda row: row["bytes_sent"], default={"source": ""})["source"]
    for options in _layouts(dict(values), arrays, mesh, most) if seen.rows else ():
        looks = [(one, now) for one in options if (now := helped(one, program))]
        # of lines that leave as much, up to a fiftieth, the first is the cause
        for one, _ in sorted(looks, key=lambda pair: 50 * sum_of(pair[1]) // sum_of(seen)):
            if now := helped(one):
                (file, line, name), spec = one
                code = f"{name} = jax.lax.with_sharding_constraint({name}, {spec})"
                return {
                    "source": innermost([(file, line)]),
                    "expression": re.sub(r"\bUNCON", "P.UNCON", code.replace("PartitionSpec", "P")),
                    "bytes_sent": sum_of(now),
                    "instead_of": sum_of(seen),
                    "peak_bytes": now.memory["peak_bytes"],
                }
    return {}


def _layouts(
    values: dict[_Place, Any], arrays: list[Any], mesh: Mesh, line: str
) -> list[list[tuple[_Place, PartitionSpec]]]:
    """List layouts to try, in the program's order: those of dims as long as one that the same axes cut in an
    argument, and others; of each the first, and those next to a line."""
    known = [(x.shape, getattr(getattr(x, "sharding", None), "spec", ())) for x in arrays]
    cuts = {(n, axes_of(cut)) for pair in known for n, cut in zip(*pair, strict=False) if cut}
    groups = sorted({(), *((a,) for a in mesh.axis_names), *(axes for _, axes in cuts)})
    rest = None if len(mesh.axis_names) == 1 else PartitionSpec.UNCONSTRAINED
    size = lambda x: x.size * x.dtype.itemsize
    large = max(map(size, values.values()), default=0) / 64
    options = {
        (place, PartitionSpec(*(axes if i == d else rest for i in range(x.ndim)))): (
            x.shape[d],
            axes,
        )
        for place, x in values.items()
        for d, axes in itertools.product(range(x.ndim), groups)
        if size(x) >= large and x.shape[d] % math.prod(mesh.shape[a] for a in axes) == 0
    }
    file, _, number = line.rpartition(":")

    def away(option: tuple[_Place, PartitionSpec]) -> float:
        home, _, at = innermost([option[0][:2]]).rpartition(":")
        return abs(int(at) - int(number)) if home == file and number else math.inf

    likely = [one for one, cut in options.items() if cut in cuts]
    both = likely, [one for one in options if one not in likely]
    return [group[:_PROGRAMS] + sorted(group[_PROGRAMS:], key=away)[:_NEAR] for group in both]


@contextlib.contextmanager
def _written(specs: dict[_Place, NamedSharding], values: dict[_Place, Any]) -> Iterator[None]:
    """Trace functions as if these layouts were written after their lines, and add to ``values`` the types of
    all arrays that code outside of libraries names. As a debugger does, it sets names in running frames."""

    def enter(frame: Any, event: str, arg: Any) -> Any:
        code, line, known = frame.f_code, frame.f_lineno, dict[str, Any]()

        def after(frame: Any, event: str, arg: Any) -> Any:
            nonlocal line
            names = frame.f_locals
            for name in (*code.co_varnames, *code.co_cellvars):
                x, place = names.get(name), (code.co_filename, line, name)
                is_array = isinstance(x, jax.core.Tracer) and bool(x.shape)
                if is_array and known.get(name) is not x:
                    values.setdefault(place, x.aval)
                    if place in specs:
                        names[name] = x = jax.lax.with_sharding_constraint(x, specs[place])
                    known[name] = x
            line = frame.f_lineno
            return after

        is_other = re.search(_LIBRARIES, code.co_filename) or code.co_name.startswith("<")
        return None if is_other else after

    with contextlib.ExitStack() as stack:
        stack.callback(sys.settrace, sys.gettrace())
        sys.settrace(enter)
        yield
