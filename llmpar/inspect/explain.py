"""Answers JAX's sharding errors by the arrow that is missing.

JAX says which rule a program broke. Here each kind of message has a sentence that says which movement the
program wants and does not name, in the notation of `llmpar.notation`. The kinds are those that lesson 12 and
JAX's own documents provoke, in the words of JAX 0.10 and 0.12 (explain.toml); other errors stay as they are.
"""

import ast
import contextlib
import re
import tomllib
import traceback
from collections.abc import Callable, Iterator
from importlib import resources
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
    text = f"{error} {_open_sum(error)}"
    for row in ERRORS:
        if not (found := re.search("|".join(row["says"]), text, re.S)):
            continue
        words = [word for word in found.groups() if word]
        with contextlib.suppress(ValueError, SyntaxError, LookupError, StopIteration):  # words not known here
            before, after = ENDS[row["ends"]](*words)
            if before == after and row["ends"] != "plain":  # they differ in something else than their layout
                continue
            axes, arrow = before.axes + before.sums, _arrow(before, after)
            spec = PartitionSpec(*(d.axes or None for d in after.dims), unreduced=frozenset(after.sums))
            known = {"before": before, "after": after, "axes": ",".join(axes), "names": repr(axes)}
            known |= {"sums": f"{{{', '.join(map(repr, axes))}}}", "arrow": arrow}
            known |= {"reshard": f"{arrow}: jax.sharding.reshard(x, {spec})"}
            return row["sentence"].replace("\n", " ").format(*words, **known)
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


def unsummed(axes: str = "") -> Ends:
    """The all-reduce over ``axes`` of a value of any shape."""
    return Layout((), tuple(sorted(set(re.findall(r"\w+", axes)) - {"None"}))), Layout(())


def finished(*words: str) -> Ends:
    """The sum that the last word's type has open."""
    return layout_of(words[-1]), Layout(layout_of(words[-1]).dims)


def disagree(operation: str, shardings: str) -> Ends:
    """From the second operand's layout to the first's."""
    found = [x for x in map(layout_of, re.findall(PRINTED["TUPLE"], shardings)) if x.axes]
    return next((b, a) for i, a in enumerate(found) for b in found[i + 1 :] if a.dims != b.dims)


def twice(operation: str, inputs: str, result: str) -> Ends:
    """The last operand without the axis that cuts two dims of the result."""
    cuts = layout_of(result).axes
    axis = next(a for a in cuts if cuts.count(a) > 1)
    last = [x for x in map(layout_of, re.findall(PRINTED["TYPE"], inputs)) if axis in x.axes][-1]
    return last, Layout(tuple(Dim(d.name, d.axes * (axis not in d.axes)) for d in last.dims))


def reshape(operation: str, kind: str, sizes: str = "") -> Ends:
    """Dims that come first or last in both shapes keep their cuts; a gather keeps none."""
    old, new, before = re.findall(r"(?<![\w@])\d+", kind), re.findall(r"\d+", sizes), layout_of(kind)
    kept = lambda i: old[: i + 1] == new[: i + 1] or old[i:] == new[max(0, len(new) - len(old) + i) :]
    return before, Layout(tuple(Dim(d.name, d.axes * kept(i)) for i, d in enumerate(before.dims)))


def differs(before: str, after: str) -> Ends:
    """Over which axes a loop's value begins to differ, as a layout of sums."""
    return unsummed(" ".join(set(_marked(before, "V:")) ^ set(_marked(after, "V:"))))


PRINTED = {
    "TYPE": r"(\w+\[[^\]]*\](?:\{[^}]*\})?)",
    "SUM": r"(\w+\[[^\]]*\]\{[^}]*U:[^}]*\})",
    "TUPLE": r"(\((?:[^()]|\([^()]*\))*\))",
    "SPEC": r"(P\((?:[^()]|\([^()]*\))*\))",
}
ENDS: dict[str, Callable[..., Ends]] = {
    "asked": lambda said, found: (layout_of(found), layout_of(said)),
    "found": lambda found, said: (layout_of(found), layout_of(said)),
    "turn": lambda name, said, other, found: (layout_of(found), layout_of(said)),
    "whole": lambda found: (layout_of(found), Layout(tuple(Dim(d.name) for d in layout_of(found).dims))),
    "plain": lambda *words: (Layout(()), Layout(())),  # no arrow is missing
}
ENDS |= {ends.__name__: ends for ends in (unsummed, finished, disagree, twice, reshape, differs)}
_ROWS = resources.files(__package__).joinpath("explain.toml").read_text(encoding="utf-8")
ERRORS = tomllib.loads(re.sub("|".join(PRINTED), lambda word: PRINTED[word[0]], _ROWS))["error"]
