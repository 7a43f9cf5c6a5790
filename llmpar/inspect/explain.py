"""Answers JAX's sharding errors by the arrow that is missing.

JAX says which rule a program broke. Here each kind of message has a sentence that says which movement the
program wants and does not name, in the notation of `llmpar.notation`. The kinds are those that lesson 12 and
JAX's own documents provoke, in the words of JAX 0.10 and 0.12; an error of another kind stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import PartitionSpec

from llmpar.mesh import LETTERS, axes_of
from llmpar.notation import AXES, Dim, Layout, parse_arrow

Ends = tuple[Layout, Layout]  # of the arrow that is missing


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
    for pattern, (missing, sentence) in ANSWERS.items():
        if not (found := re.search(pattern, str(error), re.S)):
            continue
        with contextlib.suppress(ValueError, SyntaxError, LookupError, StopIteration):  # words not known here
            before, after = missing(*found.groups(), *([_open_sum(error)] if missing is _finished else []))
            axes = before.axes + before.sums
            spec = PartitionSpec(*(d.axes or None for d in after.dims), unreduced=frozenset(after.sums))
            return sentence.format(
                *found.groups(),
                before=before,
                after=after,
                axes=",".join(axes),
                names=repr(axes),
                sums=f"{{{', '.join(map(repr, axes))}}}",
                arrow=_arrow(before, after),
                reshard=f"{_arrow(before, after)}: jax.sharding.reshard(x, {spec})",
            )
    return ""


def _open_sum(error: BaseException) -> str:
    """The type of an unfinished sum among the variables of the functions that the error went through, the
    innermost first. (JAX 0.10 does not name it.)"""
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        for value in frame.f_locals.values():
            if isinstance(value, jax.Array) and "U:" in (kind := str(jax.typeof(value))):
                return kind
    return ""


def layout_of(text: str) -> Layout:
    """The layout of a type as JAX prints it, ``float32[8@(dp,fsdp),4]{U:tp}``, or of a spec,
    ``P(('dp', 'fsdp'), None)``, or of a tuple of cuts; dims are named b, s, d and so on."""
    if "[" in text:
        dims = re.findall(r"\d+(?:@(?:\([^)]*\)|\w+))?", text.partition("[")[2].partition("]")[0])
        cuts: Any = [tuple(re.findall(r"[A-Za-z_]\w*", dim)) for dim in dims]
    else:
        cuts = ast.literal_eval(re.sub(r"^P|,? ?\w*reduced=\{[^}]*\}", "", text.strip()))
    return Layout(tuple(map(Dim, LETTERS, map(axes_of, cuts))), tuple(sorted(_marked(text, "U:|unreduced="))))


def _marked(kind: str, mark: str) -> list[str]:
    """The axes behind a mark of a type: ``U:tp`` (unfinished sums), ``V:(dp,tp)`` (values that differ)."""
    return re.findall(r"\w+", "".join(re.findall(rf"\b(?:{mark})(\{{[^}}]*\}}|\([^)]*\)|\w+)", kind)))


def _arrow(before: Layout, after: Layout) -> str:
    """An arrow and what it moves. Axes may have names that are not ours."""
    text, axis = f"{before} -> {after}", r"(?<=[/,+])\w+"
    names = dict.fromkeys(re.findall(axis, text))
    ours, theirs = (dict(zip(*pair, strict=False)) for pair in ((names, AXES), (AXES, names)))
    try:
        moves = parse_arrow(re.sub(axis, lambda m: ours.get(m[0], m[0]), text)).moves
        said = ", then ".join(map(str, moves))
    except ValueError:  # the blocks of a dim would change their order
        said = "more than one movement"
    said = re.sub(rf"\b({'|'.join(AXES)})\b", lambda m: theirs.get(m[0], m[0]), said)
    return f"'{text}' ({said})"


# ----------------------------------------------------------------------------------- which arrow is missing


def _given(said: str, found: str) -> Ends:
    return layout_of(found), layout_of(said)


def _nothing(*_: str) -> Ends:
    return Layout(()), Layout(())


def _sum(axes: str) -> Ends:
    return Layout((), tuple(sorted(set(re.findall(r"\w+", axes)) - {"None"}))), Layout(())


def _finished(*kinds: str) -> Ends:
    kind = next((kind for kind in kinds if "U:" in kind), "[]{U:a}")
    return layout_of(kind), Layout(layout_of(kind).dims)


def _disagree(operation: str, shardings: str) -> Ends:
    found = [x for x in map(layout_of, re.findall(_TUPLE, shardings)) if x.axes]
    return next((b, a) for i, a in enumerate(found) for b in found[i + 1 :] if a.dims != b.dims)


def _twice(operation: str, inputs: str, result: str) -> Ends:
    cuts = layout_of(result).axes
    axis = next(a for a in cuts if cuts.count(a) > 1)
    last = [x for x in map(layout_of, re.findall(_TYPE, inputs)) if axis in x.axes][-1]
    return last, Layout(tuple(Dim(d.name, d.axes * (axis not in d.axes)) for d in last.dims))


def _reshape(kind: str, sizes: str = "") -> Ends:
    """Dims that come first or last in both shapes keep their cuts."""
    old, new, before = re.findall(r"(?<![\w@])\d+", kind), re.findall(r"\d+", sizes), layout_of(kind)
    kept = lambda i: old[: i + 1] == new[: i + 1] or old[i:] == new[max(0, len(new) - len(old) + i) :]
    return before, Layout(tuple(Dim(d.name, d.axes * kept(i)) for i, d in enumerate(before.dims)))


def _differs(before: str, after: str) -> Ends:
    """Over which axes a loop's value begins to differ, as a layout of sums."""
    return _sum(" ".join(set(_marked(before, "V:")) ^ set(_marked(after, "V:"))))


_TYPE = r"(\w+\[[^\]]*\](?:\{[^}]*\})?)"
_TUPLE = r"(\((?:[^()]|\([^()]*\))*\))"
_SPEC = r"(P\((?:[^()]|\([^()]*\))*\))"
_TURN = rf"input carry .{{,80}}? has type {_TYPE} but the corresponding output carry \S+ has type {_TYPE}"
MISSING = "; the arrow that is missing"
CUT_TWICE = "the dim that is summed is cut by {after.axes[0]} in the one factor and by {axes} in the other"
DISAGREE = "{0} has operands laid out as '{after}' and '{before}'" + MISSING + " for one of them: {reshard}"
UNFINISHED = "{0} is given a sum that is not finished" + MISSING + " before it: {reshard}"
LOST = "{0} would lose a cut of '{before}'" + MISSING + " before it: {reshard}"
TERMS = (
    "shard_map's out_specs say that the result is the same all over {axes}, and devices hold different ones"
    + MISSING
    + " inside, if these are terms of a sum: {arrow}: lax.psum(x, {names})"
)
ANSWERS: dict[str, tuple[Callable[..., Ends], str]] = {
    rf"ambiguous how the output.*lhs_contracting_spec={_TUPLE} and rhs_contracting_spec=\1": (
        _sum,
        "both factors are cut by {axes} along the dim that is summed, so each device has one term of the sum,"
        f" and nobody finishes it{MISSING} behind the product: {{arrow}}: out_sharding=P(…,"
        " unreduced={sums}), then jax.sharding.reshard(x, P(…))",
    ),
    rf"contracting.* sharding, got {_TUPLE} and {_TUPLE}|lhs_contracting_spec={_TUPLE} and \w+={_TUPLE}": (
        lambda *cuts: _given(*filter(None, cuts)),
        f"{CUT_TWICE}{MISSING} before the product, of that dim: {{reshard}}",
    ),
    rf"(\w+) operation with inputs: (.*) produces an illegally sharded result: {_TYPE}": (
        _twice,
        f"{{0}} would cut two dims of its result by one axis{MISSING} for one of the operands: {{reshard}}",
    ),
    r"(\w+) got incompatible shardings for broadcasting: (.*)\.": (_disagree, DISAGREE),
    rf"(\w+) is a non-linear operation and cannot accept input that is unreduced. Got {_TYPE}": (
        _finished,
        UNFINISHED,
    ),
    r"unreduced(?:/reduced)? rule for (\w+) is not implemented": (_finished, UNFINISHED),
    r"is unreduced while \w+ is not. `(\w+)` operation": (_finished, UNFINISHED),
    r"passed to (dot_general) cannot be unreduced. Got (.*)": (_finished, UNFINISHED),
    r"should be reduced along the same axes .HS is unreduced on. Got (.*)": (
        _finished,
        UNFINISHED.replace("{0}", "a product"),
    ),
    rf"This (reshape) is not supported.*Got operand type: {_TYPE}, new sizes: {_TUPLE}": (
        lambda _, kind, sizes: _reshape(kind, sizes),
        LOST,
    ),
    rf"to provide output PartitionSpec for the (gather) indexing.*Got operand=\w+\({_TYPE}\)": (
        lambda _, kind: _reshape(kind),
        LOST,
    ),
    rf"in_specs passed to shard_map: {_SPEC} does not match the specs of the input: {_SPEC}": (
        _given,
        f"shard_map is given a value that lies otherwise than in_specs say{MISSING} before it: {{reshard}}",
    ),
    rf"acts as an assert.*The array sharding: {_SPEC} did not match the sharding provided: {_SPEC}": (
        lambda found, said: _given(said, found),
        f"on explicit axes with_sharding_constraint moves nothing{MISSING} in its place: {{reshard}}",
    ),
    r"only varying across mesh axes \{[^}]*\} and not \{([^}]*)\}": (_sum, TERMS),
    r"is replicated across mesh axis (\S+), but could not infer replication": (_sum, TERMS),
    _TURN + ", so the manual axis": (
        _differs,
        "a loop's value is the same all over {axes} at one end of a turn and differs at the other; no arrow"
        " is missing, for nothing moves: say before the loop (or at the end of the turn, if it differs"
        " before) that devices may hold different values: jax.lax.pcast(x, {names}, to='varying')",
    ),
    _TURN: (
        _given,
        f"a loop's value leaves a turn in another layout than it came in{MISSING} at the end of the turn:"
        " {reshard}",
    ),
    r"Closing over inputs to shard_map|[Cc]ontext mesh .*Manual.* should match|should match .*Manual": (
        _nothing,
        "a value from outside shard_map is used inside it; no arrow leads in but an argument: give it to the"
        " function, with the layout of its type as in_specs",
    ),
    r"[Cc]ontext mesh AbstractMesh\((.*?\)), .*? should match the .*?AbstractMesh\((.*?\)), ": (
        _nothing,
        "the mesh in context is ({0}), and the value lies on another ({1}); no arrow leads from mesh to mesh:"
        " use jax.device_put(x, NamedSharding(mesh, P(…))) with the mesh in context, or with"
        " jax.set_mesh(the other)",
    ),
}
