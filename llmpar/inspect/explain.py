"""Answers JAX's sharding errors, on a mesh of explicit axes, by the arrow that is missing.

JAX says which rule a program broke. Here each kind of message has a sentence that says which movement the
program wants and does not name, in the notation of `llmpar.notation`. Messages are those of JAX 0.10 and
0.12.
"""

from __future__ import annotations

import ast
import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from llmpar.mesh import LETTERS, axes_of
from llmpar.notation import AXES, Arrow, Dim, Layout


class MissingArrow(ValueError):
    """A sharding error of JAX's in our words; the error itself is its cause."""


def explain(error: BaseException | None = None) -> Any:
    """Say in one sentence which arrow a program lacks: of an ``error``, or of one that a block raises.

    ``explain(error)`` gives the sentence, "" for an error of another kind. ``with explain():`` raises it as
    `MissingArrow`, and lets other errors pass.
    """
    return _explained() if error is None else _sentence(error)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if sentence := _sentence(error):
            raise MissingArrow(sentence) from error
        raise


def _sentence(error: BaseException) -> str:
    for pattern, answer in ANSWERS.items():
        if found := re.search(pattern, str(error), re.S):
            more = [_open_sum(error)] if answer is _unfinished and found.re.groups == 1 else []
            return answer(*found.groups(), *more)
    return ""


def _open_sum(error: BaseException) -> str:
    """The type of an unfinished sum among the variables of the functions that the error went through, the
    innermost first; "" where there is none. (JAX 0.10 does not name it.)"""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if isinstance(value, jax.Array) and "U:" in (kind := str(jax.typeof(value))):
                return kind
    return ""


# -------------------------------------------------------------------------------- layouts, as JAX prints them


def _layout(cuts: list, sums: Any = ()) -> Layout:
    return Layout(tuple(map(Dim, LETTERS, map(axes_of, cuts))), tuple(sorted(sums)))


def layout_of(text: str) -> Layout:
    """The layout of a type as JAX prints it, ``float32[8@(dp,fsdp),4]{U:tp}``, or of a spec,
    ``P(('dp', 'fsdp'), None)``, or of a tuple of cuts; dims are named b, s, d and so on."""
    if "[" in text:
        dims, _, marks = text.partition("[")[2].partition("]")
        cuts = [
            tuple(re.findall(r"[A-Za-z_]\w*", d)) or None
            for d in re.findall(r"\d+(?:@(?:\([^)]*\)|\w+))?", dims)
        ]
        return _layout(cuts, re.findall(r"\w+", "".join(re.findall(r"U:(\([^)]*\)|\w+)", marks))))
    call = ast.parse(text.strip().removeprefix("P") or "()", mode="eval").body if text[:1] != "P" else None
    if call is not None:
        return _layout(list(ast.literal_eval(call)))
    spec: Any = ast.parse(text.strip(), mode="eval").body
    words = {word.arg: ast.literal_eval(word.value) for word in spec.keywords}
    return _layout([ast.literal_eval(arg) for arg in spec.args], words.get("unreduced", ()))


def _spec(layout: Layout) -> str:
    """A layout as code."""
    one = lambda axes: "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)
    sums = [f"unreduced={{{', '.join(map(repr, layout.sums))}}}"] if layout.sums else []
    return f"P({', '.join([*[one(d.axes) for d in layout.dims], *sums])})"


def _arrow(before: Layout, after: Layout) -> str:
    """An arrow, what moves, and how it is written. Axes may have names that are not ours."""
    names = dict.fromkeys([*before.axes, *before.sums, *after.axes, *after.sums])
    ours = dict(zip(names, AXES, strict=False))
    foreign = {one: other for other, one in ours.items()}
    moves = Arrow(_renamed(before, ours), _renamed(after, ours)).moves
    said = re.sub(
        r"\b(" + "|".join(AXES) + r")\b", lambda m: foreign.get(m[0], m[0]), ", then ".join(map(str, moves))
    )
    return f"'{before} -> {after}' ({said}): jax.sharding.reshard(x, {_spec(after)})"


def _renamed(layout: Layout, names: dict[str, str]) -> Layout:
    dims = tuple(Dim(d.name, tuple(names[a] for a in d.axes)) for d in layout.dims)
    return Layout(dims, tuple(names[a] for a in layout.sums))


def _without(layout: Layout, place: int | None = None) -> Layout:
    """The layout with one dim whole, or all."""
    return Layout(tuple(Dim(d.name, () if place in (None, i) else d.axes) for i, d in enumerate(layout.dims)))


# ------------------------------------------------------------------------------------------------ the answers


def _product(left: str, right: str) -> str:
    one, other = layout_of(left), layout_of(right)
    if one.dims == other.dims:
        axes = ",".join(one.axes)
        sums = _spec(Layout((), one.axes)).removeprefix("P(").removesuffix(")")
        plus = " ".join(f"+{a}" for a in one.axes)
        return (
            f"both factors are cut by {axes} along the dim that is summed, so each device has one term of the"
            f" sum, and nobody finishes it; the arrow that is missing behind the product: '{plus} -> whole'"
            f" (all-reduce over {axes}): out_sharding=P(…, {sums}), then jax.sharding.reshard(x, P(…))"
        )
    return (
        f"the dim that is summed is cut by {','.join(one.axes)} in the one factor and by"
        f" {','.join(other.axes)} in the other; the arrow that is missing before the product, of that dim:"
        f" {_arrow(other, one)}"
    )


def _twice(operation: str, inputs: str, result: str) -> str:
    cuts = layout_of(result)
    axis = next(a for a in cuts.axes if cuts.axes.count(a) > 1)
    factors = [layout_of(text) for text in re.findall(r"\w+\[[^\]]*\](?:\{[^}]*\})?", inputs)]
    last = [x for x in factors if axis in x.axes][-1]
    place = next(i for i, d in enumerate(last.dims) if axis in d.axes)
    return (
        f"{operation} would cut two dims of its result by {axis}, and an axis cuts one; the arrow that is"
        f" missing for one of the operands: {_arrow(last, _without(last, place))}"
    )


def _disagree(operation: str, shardings: str) -> str:
    tuples = re.findall(r"\((?:[^()]|\([^()]*\))*\)", shardings)
    found = [layout_of(text) for text in tuples]
    pairs = [
        (a, b) for i, a in enumerate(found) for b in found[i + 1 :] if a.dims != b.dims and a.axes and b.axes
    ]
    one, other = pairs[0]
    return (
        f"{operation} has operands laid out as '{one}' and '{other}'; the arrow that is missing for one of"
        f" them: {_arrow(other, one)}"
    )


def _unfinished(operation: str, kind: str = "") -> str:
    layout = layout_of(kind) if "U:" in kind else None
    finished = Layout(tuple(layout.dims)) if layout else None
    arrow = (
        _arrow(layout, finished)
        if layout and finished
        else (
            "from '+a' to 'whole', a the axes after U: in its type (all-reduce): jax.sharding.reshard(x,"
            " P(…))"
        )
    )
    return f"{operation} is given a sum that is not finished; the arrow that is missing before it: {arrow}"


def _lost(operation: str, kind: str, axis: str = "") -> str:
    layout = layout_of(kind)
    whole = _without(layout, int(axis) if axis else None)
    return (
        f"{operation} would lose a cut of '{layout}'; the arrow that is missing before it:"
        f" {_arrow(layout, whole)}"
    )


def _reshape(kind: str, sizes: str) -> str:
    """Dims that come first or last in both shapes keep their cuts."""
    layout, old, new = layout_of(kind), re.findall(r"(?<![\w@])\d+", kind), re.findall(r"\d+", sizes)
    kept = [
        i
        for i in range(len(old))
        if old[: i + 1] == new[: i + 1] or old[i:] == new[len(new) - len(old) + i :]
    ]
    whole = Layout(tuple(Dim(d.name, d.axes * (i in kept)) for i, d in enumerate(layout.dims)))
    return (
        f"reshape would lose a cut of '{layout}'; the arrow that is missing before it:"
        f" {_arrow(layout, whole)}"
    )


def _specs(wanted: str, found: str) -> str:
    return (
        "shard_map is given a value that lies otherwise than its in_specs say; the arrow that is missing"
        f" before it: {_arrow(layout_of(found), layout_of(wanted))}"
    )


def _inside(operation: str, axis: str) -> str:
    return (
        f"{operation} names {axis} inside shard_map, where a value is one device's block and types have no"
        f" cuts; there an arrow is a collective: 'b/{axis} -> b' is lax.all_gather(x, {axis!r}, tiled=True)"
        f" and '+{axis} -> whole' is lax.psum(x, {axis!r})"
    )


def _varies(axes: str) -> str:
    names = re.findall(r"\w+", axes)
    plus = " ".join(f"+{a}" for a in names)
    return (
        f"shard_map's out_specs say that the result is the same all over {','.join(names)}, and devices hold"
        f" different ones; the arrow that is missing inside, if these are terms of a sum: '{plus} -> whole'"
        f" (all-reduce over {','.join(names)}): lax.psum(x, {tuple(names)!r})"
    )


def _mesh(axes: str) -> str:
    return " ".join(f"{a}={n}" for a, n in re.findall(r"'(\w+)': (\d+)", axes))


CAPTURED = (
    "a value from outside shard_map is used inside it; no arrow leads in but an argument: give it to the"
    " function, with the layout of its type as in_specs"
)


def _meshes(context: str, own: str) -> str:
    types = [set(re.findall(r"Explicit|Auto|Manual", mesh)) for mesh in (context, own)]
    if "Manual" in types[0] ^ types[1]:
        return CAPTURED
    where = [
        f"{_mesh(mesh)}, {'explicit' if 'Explicit' in kind else 'automatic'} axes"
        for mesh, kind in zip((context, own), types, strict=True)
    ]
    return (
        f"the mesh in context is ({where[0]}), and the value lies on another ({where[1]}); no arrow leads"
        " from mesh to mesh: use jax.device_put(x, NamedSharding(mesh, P(…))) with the mesh in context, or"
        " with jax.set_mesh(the other)"
    )


def _unknown(axis: str, mesh: str) -> str:
    axes = ", ".join(re.findall(r"\w+", mesh))
    return (
        f"an arrow 'b -> b/{axis}' needs a mesh with an axis {axis}, and the one in context has {axes}; use"
        " one of these, or another mesh: with jax.set_mesh(mesh)"
    )


def _carry(before: str, after: str) -> str:
    return (
        "a loop's value leaves a turn in another layout than it came in; the arrow that is missing at the"
        f" end of the turn: {_arrow(layout_of(after), layout_of(before))}"
    )


def _asserted(found: str, wanted: str) -> str:
    return (
        "on explicit axes with_sharding_constraint moves nothing; the arrow that is missing in its place:"
        f" {_arrow(layout_of(found), layout_of(wanted))}"
    )


_TYPE = r"(\w+\[[^\]]*\](?:\{[^}]*\})?)"
_TUPLE = r"(\((?:[^()]|\([^()]*\))*\))"
_SPEC = r"(P\((?:[^()]|\([^()]*\))*\))"
ANSWERS: dict[str, Callable[..., str]] = {
    rf"ambiguous how the output.*lhs_contracting_spec={_TUPLE} and rhs_contracting_spec={_TUPLE}": _product,
    rf"contracting dimensions to have (?:consistent|the same) sharding, got {_TUPLE} and {_TUPLE}": _product,
    rf"(\w+) operation with inputs: (.*) produces an illegally sharded result: {_TYPE}": _twice,
    r"(\w+) got incompatible shardings for broadcasting: (.*)\.": _disagree,
    r"(dot_general) requires lhs batch dimensions and rhs batch .* sharding, got (.*)\.": _disagree,
    r"All (operands) should have the same sharding. Got shardings (.*)": lambda what, text: _disagree(
        "joining", " ".join(x[1:] for x in re.findall(rf"spec={_SPEC}", text))
    ),
    rf"(\w+) is a non-linear operation and cannot accept input that is unreduced. Got {_TYPE}": _unfinished,
    r"unreduced(?:/reduced)? rule for (\w+) is not implemented": _unfinished,
    r"is unreduced while \w+ is not. `(\w+)` operation": _unfinished,
    r"passed to (dot_general) cannot be unreduced. Got (.*)": _unfinished,
    r"(?:RHS|LHS) should be reduced along the same axes (?:LHS|RHS) is unreduced on. Got (.*)": (
        lambda kinds: _unfinished("a product", next((x for x in re.findall(_TYPE, kinds) if "U:" in x), ""))
    ),
    rf"This reshape is not supported.*Got operand type: {_TYPE}, new sizes: {_TUPLE}": _reshape,
    rf"to provide output PartitionSpec for the (gather) indexing.*Got operand=\w+\({_TYPE}\)": _lost,
    rf"(dynamic_slice|dynamic_update_slice|slice) on sharded dims.*input type={_TYPE}": _lost,
    rf"Input should be unsharded over the axis being reduced. Got input type={_TYPE} and axis=(\d+)": (
        lambda kind, axis: _lost("a running sum", kind, axis)
    ),
    rf"in_specs passed to shard_map: {_SPEC} does not match the specs of the input: {_SPEC}": _specs,
    r"PartitionSpec passed to (\w+) cannot contain .* axis name: (\w+) of type: AxisType.Manual": _inside,
    "Closing over inputs to shard_map": lambda: CAPTURED,
    r"only varying across mesh axes \{[^}]*\} and not \{([^}]*)\}": _varies,
    r"[Cc]ontext mesh AbstractMesh(\(.*?\), .*?\)) should match the .*?AbstractMesh(\(.*?\), .*?\))": _meshes,
    r"Resource axis: (\w+) of .* is not found in mesh: (.*?)\.": _unknown,
    rf"input carry \S+ has type {_TYPE} but the corresponding output carry component has type {_TYPE}": (
        _carry
    ),
    rf"acts as an assert.*The array sharding: {_SPEC} did not match the sharding provided: {_SPEC}": (
        _asserted
    ),
}
