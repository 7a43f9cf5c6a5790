"""Answer JAX's sharding errors by the arrow that is missing.

JAX says which rule a program broke. Here each kind of mistake has a sentence: which movement the program
lacks, in the notation of `llmpar.plan.layout`, and after the last colon the Python text that mends it, where
one does. explain.toml has the sentences, with the words of JAX 0.10 and 0.12 that they answer; other errors
are left alone. Nothing of the user's program is evaluated: what JAX's own functions were given is read from
the traceback.
"""

import contextlib
import difflib
import dis
import itertools
import re
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from types import FrameType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from llmpar.inspect.moves import layout_from_text, marked, spec_cuts
from llmpar.plan.layout import LETTERS, Arrow, Dim, Layout, axes_of

_Known = dict[str, Any]  # what a sentence can name
LONGEST = 4000
"""Characters of an error's text that are read: JAX says what is wrong at the beginning, and may add a
dump."""


class MissingArrow(ValueError):
    """State a sharding error of JAX's in our words; JAX's own error is the cause."""


def explain(error: BaseException | None = None) -> Any:
    """Say in one sentence which arrow a program lacks, for an ``error`` or for what a ``with`` block raises.

    ``explain(error)`` returns the sentence, "" for an error of another kind. ``with explain():`` raises it as
    `MissingArrow`, and lets other errors pass.
    """
    return noted(instead=True) if error is None else _sentence(error)


@contextlib.contextmanager
def noted(instead: bool = False) -> Iterator[None]:
    """Add the sentence of `explain` as a note to an error that a ``with`` block, or a function, raises; or
    raise it ``instead``."""
    try:
        yield
    except Exception as error:
        sentence = _sentence(error)
        if sentence and instead:
            raise MissingArrow(sentence) from error
        if sentence:
            error.add_note(f"llmpar: {sentence}")
        raise


def _sentence(error: BaseException) -> str:
    if _is_users(error):
        return ""
    text = str(error)[:LONGEST]
    for rule, row in ((rule, row) for rule, rows in ERRORS.items() for row in rows):
        for match in filter(None, (re.search(says, text, re.S) for says in row["says"])):
            words = [word for word in match.groups() if word]
            # a rule that cannot read these words leaves the error to the next row
            with contextlib.suppress(ValueError, SyntaxError, LookupError, StopIteration):
                return (
                    row["sentence"].replace("\n", " ").format(*words, **_RULES[rule](error, *words))
                )
    return ""


def _layouts(text: str) -> list[Layout]:
    """Read the layouts that a message names: as shardings, as types, as specs, or as tuples of cuts."""
    for pattern in (rf"spec={PRINTED['SPEC']}", PRINTED["TYPE"], PRINTED["SPEC"], PRINTED["TUPLE"]):
        if matches := re.findall(pattern, text):
            return [layout_from_text(x) for x in matches]
    raise LookupError(text)


def _arrow(before: Layout, after: Layout) -> str:
    """Write an arrow and its moves."""
    try:
        words = ", then ".join(map(str, Arrow(before, after).moves))
    except ValueError:  # the blocks of a dim would change their order
        words = "more than one movement"
    return f"'{before} -> {after}' ({words})"


def _missing(before: Layout, after: Layout, **more: Any) -> _Known:
    """Return the arrow between two layouts, and the text of the reshard that carries it out."""
    if before == after or set(after.sums) - set(before.sums):
        raise ValueError("no arrow leads from the one to the other")
    axes, arrow = before.axes + before.sums, _arrow(before, after)
    return {
        "before": before,
        "after": after,
        "axes": ",".join(axes),
        "names": repr(axes),
        "arrow": arrow,
        "reshard": f"{arrow}: jax.sharding.reshard(x, {_sharding(after)})",
        "spec": _spec(after),
        **more,
    }


def _sharding(layout: Layout) -> str:
    """Write a layout as `reshard` takes it: as a spec only where a mesh is in context."""
    is_alone = jax.sharding.get_abstract_mesh().empty
    return f"jax.NamedSharding(mesh, {_spec(layout)})" if is_alone else str(_spec(layout))


def _spec(layout: Layout) -> PartitionSpec:
    """Return a layout as JAX writes it; without cuts an empty spec, which fits every rank."""
    cuts = [d.axes or None for d in layout.dims] if layout.axes or layout.sums else []
    return PartitionSpec(*cuts, unreduced=frozenset(layout.sums))


# --------------------------------------------------------------------------------- what the traceback holds


def _is_users(error: BaseException) -> bool:
    """Tell whether a ``raise`` outside of JAX made an error. JAX may leave its own frames out of a traceback:
    then the innermost frame calls."""
    tb = error.__traceback__
    while tb and tb.tb_next:
        tb = tb.tb_next
    if not tb or tb.tb_frame.f_globals.get("__name__", "").startswith("jax."):
        return False
    return dis.opname[tb.tb_frame.f_code.co_code[tb.tb_lasti]] == "RAISE_VARARGS"


def _frames(error: BaseException, of_jax: bool) -> list[FrameType]:
    """List the traceback's frames in JAX's code, or in the user's, the outermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [f for f in frames if f.f_globals.get("__name__", "").startswith("jax.") == of_jax]


def _types(error: BaseException) -> list[Any]:
    """Return the types of the arrays among the variables of the user's frames, the innermost frame first."""
    frames = reversed(_frames(error, of_jax=False))
    leaves = (x for frame in frames for x in jax.tree.leaves(list(frame.f_locals.values())))
    return [jax.typeof(x) for x in leaves if isinstance(x, jax.Array)]


def _functions(error: BaseException) -> list[str]:
    """List the names of JAX's functions in the traceback, the outermost first."""
    return [frame.f_code.co_qualname for frame in _frames(error, of_jax=True)]


def _inside(error: BaseException, name: str) -> _Known:
    """Return nothing to name; raises where ``name`` is none of JAX's functions in the traceback."""
    if name not in _functions(error):
        raise LookupError(name)
    return {}


# Ranks of a matmul's factors -> what it computes, as einsum writes it.
_RANKS = {
    (2, 2): "ij,jk->ik",
    (3, 2): "bij,jk->bik",
    (3, 3): "bij,bjk->bik",
    (2, 1): "ij,j->i",
    (1, 2): "j,jk->k",
}


def _factors(error: BaseException) -> tuple[str, Any, Any]:
    """Return a product's dims as einsum writes them ('' of matmul), and its two factors: the arguments of
    JAX's function."""
    for frame in _frames(error, of_jax=True):
        arguments = frame.f_locals
        if frame.f_code.co_name in ("matmul", "dot"):
            return "", arguments["a"], arguments["b"]
        if frame.f_code.co_name == "einsum":
            return arguments["subscripts"], *arguments["operands"]
    raise LookupError("no product")


_Cuts = dict[str, tuple[str, ...]]


def _cut_dims(error: BaseException) -> tuple[list[_Cuts], str]:
    """Return which axes cut each dim of a product's factors, by einsum's letters, and the letters of its
    result. Raises for all but plain products of two factors."""
    dims, *factors = _factors(error)
    specs = [jax.typeof(x).sharding.spec for x in factors]
    dims = dims.replace(" ", "") or _RANKS[len(specs[0]), len(specs[1])]
    given, _, result = dims.partition("->")
    pairs = zip(given.split(","), specs, strict=True)
    return [dict(zip(letters, map(axes_of, spec), strict=True)) for letters, spec in pairs], result


def cut_as(cuts: Iterable[tuple[str, ...]]) -> Layout:
    """Return a layout of dims b, s, d … with these cuts."""
    return Layout(tuple(map(Dim, LETTERS, cuts)))


def _result_without(error: BaseException, axes: set[str]) -> Layout:
    """Return the layout of a product in which ``axes`` cut nothing, and each other one dim, its first."""
    (one, other), result = _cut_dims(error)
    cuts = other | {letter: cut for letter, cut in one.items() if cut or letter not in other}
    free = [tuple(axis for axis in cuts[letter] if axis not in axes) for letter in result]
    return cut_as(_first_cuts(free))


# ----------------------------------------------------------------------------------- which arrow is missing


def _product(error: BaseException, left: str, right: str) -> _Known:
    """Return the sum over the axes that cut both factors along the dims that are summed, or the gather of one
    factor."""
    (one, other), whole = map(layout_from_text, (left, right)), Layout(())
    result = f"an out_sharding that names none of {', '.join(sorted({*one.axes, *other.axes}))}"
    with contextlib.suppress(Exception):  # JAX's arguments are read only where they are plain
        whole = _result_without(error, {*one.axes, *other.axes})
        result = f"out_sharding={_sharding(whole)}"
    before, after = (
        (Layout(whole.dims, one.axes), whole) if one.axes == other.axes else (other, one)
    )
    words = {"left": ",".join(one.axes), "right": ",".join(other.axes), "result": result}
    return _missing(before, after, **words)


def _alike(error: BaseException, left: str, right: str) -> _Known:
    """Return the arrow of the factor whose summed dims are cut less, to the cuts of the other."""
    before, after = sorted(
        map(layout_from_text, (left, right)), key=lambda layout: len(layout.axes)
    )
    words = {"left": before, "right": after, "reshard": f"{_arrow(before, after)} of that dim"}
    with contextlib.suppress(Exception):  # as in `_product`
        (one, other), result = _cut_dims(error)
        if layout_from_text(left) == after:
            one, other = other, one
        cuts = [cut if letter in result else other.get(letter, cut) for letter, cut in one.items()]
        return {**words, **_missing(cut_as(one.values()), cut_as(cuts))}
    return words


def _unsummed(error: BaseException, axes: str = "", but: str = "") -> _Known:
    """Return the all-reduce over ``axes``, or over the axes along which the first type varies and ``but``
    does not."""
    names = (
        {*marked(axes, "V:")} - {*marked(but, "V:")}
        if but
        else {*re.findall(r"\w+", axes)} - {"None"}
    )
    return _missing(Layout((), tuple(sorted(names))), Layout(()))


def _finished(error: BaseException, operation: str = "what follows") -> _Known:
    """Return the end of the unfinished sum of a type in the message, else of a variable: JAX does not always
    name it."""
    texts = re.findall(PRINTED["TYPE"], str(error)[:LONGEST]) + [
        str(text) for text in _types(error)
    ]
    sums = next(layout_from_text(text) for text in texts if "U:" in text)
    return _missing(sums, Layout(sums.dims), operation=operation)


def _disagree(error: BaseException, operation: str, shardings: str) -> _Known:
    """Return the arrow of the second operand to the cuts of the first, in the dims in which both are cut."""
    for a, b in itertools.combinations(_layouts(shardings), 2):
        pairs = [(x.axes, y.axes) for x, y in zip(a.dims, b.dims, strict=True)]
        if any(x and y and x != y for x, y in pairs):
            cuts = [
                x if x and y else tuple(axis for axis in y if axis not in a.axes) for x, y in pairs
            ]
            return _missing(b, cut_as(cuts), other=a)
    raise LookupError(shardings)


def _joined(error: BaseException, *shardings: str) -> _Known:
    """Return the arrow of an operand to the cuts that all operands have."""
    layouts = _layouts(" ".join(shardings))
    dims = tuple(d if all(d in x.dims for x in layouts) else Dim(d.name) for d in layouts[0].dims)
    after = Layout(dims, tuple(s for s in layouts[0].sums if all(s in x.sums for x in layouts)))
    return _missing(
        next(x for x in layouts if x != after), after, all=", ".join(f"'{x}'" for x in layouts)
    )


def _unsharded(error: BaseException, says: str) -> _Known:
    """Return the arrow that makes whole the dims along which something is computed; JAX names them, or
    not."""
    before = _layouts(says)[0]
    dims = [*range(len(before.dims))][-2 * ("non-batch" in says) :]
    if match := re.search(
        r"(?<!mesh )(?:axis|axes|dimension)[= ]\(?-?\d[\d, ]*|\dth dimension", says
    ):
        dims = [int(n) % len(before.dims) for n in re.findall(r"-?\d+", match[0])]
    cuts = [d.axes * (i not in dims) for i, d in enumerate(before.dims)]
    return _missing(before, cut_as(cuts))


def _rows(error: BaseException, table: str, indices: str) -> _Known:
    """Return the sharding of rows that cut indices look up in a cut table: the cuts of the indices."""
    if "take_along_axis" in _functions(error):  # its dims are those of the table
        raise LookupError(indices)
    whole = [()] * (len(layout_from_text(table).dims) - 1)
    cuts = [d.axes for d in layout_from_text(indices).dims[:-1]]
    return {"spec": _sharding(cut_as([*cuts, *whole]))}


def _twice(error: BaseException, operation: str, inputs: str, result: str) -> _Known:
    """Return the arrow of the last operand that drops the axis which cuts two dims of the result."""
    cuts = layout_from_text(result).axes
    axis = next(a for a in cuts if cuts.count(a) > 1)
    last = [x for x in _layouts(inputs) if axis in x.axes][-1]
    return _missing(last, cut_as(d.axes * (axis not in d.axes) for d in last.dims))


def _reshape(error: BaseException, operation: str, text: str, sizes: str = "") -> _Known:
    """Return the arrow that keeps the cuts of dims that come first or last in both shapes; a gather keeps
    none."""
    old = re.findall(r"(?<![\w@])\d+", text)
    new = re.findall(r"\d+", sizes)
    before, more = layout_from_text(text), len(new) - len(old)
    kept = lambda i: old[: i + 1] == new[: i + 1] or old[i:] == new[max(0, more + i) :]
    return _missing(before, cut_as(d.axes * kept(i) for i, d in enumerate(before.dims)))


def _varies(error: BaseException, first: str, before: str, second: str, after: str) -> _Known:
    """Return the axes along which a loop's value or a branch's result varies at one end, and the other
    end."""
    a, b = (set(marked(text, "V:")) for text in (before, after))
    names = tuple(sorted(b - a or a - b))
    return {"axes": ",".join(names), "names": repr(names), "where": first if b - a else second}


def _same_values(given: str, wanted: str) -> None:
    """Raise where two types differ in shape or dtype."""
    if len({re.sub(r"@(\w+|\([^)]*\))|\{[^}]*\}", "", text) for text in (given, wanted)}) > 1:
        raise ValueError("another shape or dtype")


def _typed(error: BaseException, given: str, wanted: str) -> _Known:
    """Return the arrow between types that differ in their cuts alone."""
    _same_values(given, wanted)
    return _between(given, wanted)


def _marked(error: BaseException, given: str, wanted: str) -> _Known:
    """Return the axes along which the wanted type varies and the one given does not."""
    _same_values(given, wanted)
    names = tuple(sorted({*marked(wanted, "V:")} - {*marked(given, "V:")}))
    if not names:
        raise ValueError("nothing is to be marked")
    return {"axes": ",".join(names), "names": repr(names)}


# ------------------------------------------------------------------------- mistakes that are no missing arrow


def _scattered(error: BaseException) -> _Known:
    """Return the name of the function of JAX's, called by the user, that scatters; raises for x.at[…]."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    called = 1 + max(i for i, module in enumerate(modules) if not module.startswith("jax."))
    if modules[called].endswith("array_methods"):
        raise LookupError("written by the user")
    return {"operation": frames[called].f_code.co_name}


def _uneven(error: BaseException, dim: str, parts: str, size: str, shape: str) -> _Known:
    """Return the sizes next to one that its axes do not divide, and the padding to the larger of them."""
    scatters = "_scatter_update" in _functions(error)  # x.at[…].set(…): the size is that of a part
    maps = "_internal_pmap_axis_name" in str(error)
    inside = any("V:" in str(kind) for kind in _types(error))  # one device's block
    if scatters or maps or inside:
        raise LookupError(shape)
    n, more = int(size), -int(size) % int(parts)
    pad = tuple((0, more * (i == int(dim))) for i, _ in enumerate(re.findall(r"\d+", shape)))
    good = " or ".join(str(m) for m in (n + more - int(parts), n + more) if m)
    return {"size": n, "parts": parts, "good": good, "pad": f"jnp.pad(x, {pad})"}


def _unknown(error: BaseException, *words: str) -> _Known:
    """Return the axes that there are, and the one whose name is nearest."""
    pick = lambda *opens: next((word for word in words if word.startswith(opens)), "")
    axis = next(word for word in words if word.isidentifier())
    spec = pick("P(")
    meshes = [kind.sharding.mesh for kind in _types(error)]
    names = re.findall(r"\w+", pick("(", "{")) or [a for mesh in meshes for a in mesh.manual_axes]
    if axis in names or not names:
        raise LookupError(axis)
    free = {name.lower(): repr(name) for name in names if repr(name) not in spec}
    near = [free[x] for x in difflib.get_close_matches(axis.lower(), free, 1)]
    meant = (
        f"; perhaps this was meant: {spec.replace(repr(axis), near[0]) or near[0]}" if near else ""
    )
    return {"axis": axis, "axes": ", ".join(sorted({*names})), "near": meant}


def _once(error: BaseException, spec: str, axis: str) -> _Known:
    """Return a spec that keeps an axis at its first place alone."""
    cuts = _first_cuts([axes_of(cut) for cut in spec_cuts(spec)])
    return {"spec": PartitionSpec(*(cut or None for cut in cuts))}


def _first_cuts(cuts: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the cuts of dims with each axis at its first place alone."""
    for i, cut in enumerate(cuts):
        cuts[i] = tuple(
            dict.fromkeys(a for a in cut if not any(a in before for before in cuts[:i]))
        )
    return cuts


PRINTED = {
    "TYPE": r"(\w+\[[^\]]*\](?:\{[^}]*\})?)",
    "TUPLE": r"(\((?:[^()]|\([^()]*\))*\))",
    "SPEC": r"(P\((?:[^()]|\([^()]*\))*\))",
}


def _between(before: str, after: str) -> _Known:
    """Return the arrow between two types or specs, as JAX prints them."""
    return _missing(layout_from_text(before), layout_from_text(after))


_RULES: dict[str, Callable[..., _Known]] = {
    "given": lambda error, wanted, given: _between(given, wanted),
    "constraint": lambda error, given, wanted: _between(given, wanted),
    "iteration": lambda error, name, wanted, other, given: _between(given, wanted),
    "argument": lambda error, mesh, wanted, given: _between(given, wanted),
    "written": lambda error, text: {"spec": _sharding(layout_from_text(text))},
    "shorter": lambda error, spec, rank: {"spec": PartitionSpec(*spec_cuts(spec)[: int(rank)])},
    "plain": lambda error, *words: {},
    "enclosed": lambda error: _inside(error, "_auto_axes.<locals>.decorator"),
    "specified": lambda error, *words: _inside(error, "check_pspec"),
    "part": lambda error, *words: _inside(error, "_scatter_update"),
    "scattered": _scattered,
    "typed": _typed,
    "marked": _marked,
    "product": _product,
    "alike": _alike,
    "unsummed": _unsummed,
    "finished": _finished,
    "disagree": _disagree,
    "joined": _joined,
    "unsharded": _unsharded,
    "rows": _rows,
    "twice": _twice,
    "reshape": _reshape,
    "varies": _varies,
    "uneven": _uneven,
    "unknown": _unknown,
    "once": _once,
}
_ROWS = resources.files(__package__).joinpath("explain.toml").read_text(encoding="utf-8")
ERRORS = tomllib.loads(re.sub("|".join(PRINTED), lambda word: PRINTED[word[0]], _ROWS))
