"""Layouts and arrows: the notation that everything else is written in.

    layout   b/dp,fsdp s/sp d +tp     dim b cut by dp and fsdp, s cut by sp, d whole, unfinished sum over tp
    arrow    b s d +tp -> b s/tp d    one reduce-scatter over tp

One letter is a tensor dim, a word is a mesh axis (`llmpar.plan.mesh_shape`). In the model's text the axes are
not known yet. There a layout opens with the *region* that a value lives in, and a ``+`` names the dim that
was summed over:

    attention b s d +n -> stream b s d

An axis may carry a dtype, ``d/fsdp:bf16 -> d``: what moves over it travels in that one (`WIRES`).

A :class:`~llmpar.plan.plan.Resolved` plan knows which axes cut each dim in each region: it makes that
*logical* arrow a physical one. A layout may end with the name of the mesh that it is on; an arrow from one
mesh to another is planned by `llmpar.plan.two_meshes`, and carried out by `llmpar.serve.two_meshes`:

    d/fsdp m/tp @train -> d m/tp @serve
"""

import functools
import math
import re
from dataclasses import dataclass, field

from llmpar.plan.mesh_shape import AXES, ORDER, NotationError

DIMS = {
    "b": "batch",
    "s": "query positions",
    "t": "key positions; taps of a convolution",
    "d": "model width",
    "n": "query heads; ranks of a node",
    "k": "KV heads",
    "r": "query heads per KV head",
    "h": "head width",
    "m": "feed-forward width",
    "e": "experts",
    "v": "vocabulary",
    "c": "slots for tokens on their way to experts; width of a latent; copies of experts",
    "l": "layers",
    "u": "nodes of ep, or a dim of 1",
    "z": "inner width of an adapter, or the one head of a latent",
}
"""The tensor dims, and what each counts: some are used anew in one region."""
# The dtypes on arrows, by the fields of a plan: as it is computed; bfloat16; 8 bits, 4 of them the exponent
# and 3 the mantissa, with a float32 scale for each block.
WIRES = {"same": "", "bfloat16": "bf16", "float8": "e4m3"}
# Numbers that share a scale, one after the other on their device.
SCALED = 32
LETTERS = "bsdnkrhmevclut"
"""Names of the dims of a value that has none, in order."""
METRICS = "loss, tokens and norm"  # the name of a step's last sum, in a census


@dataclass(frozen=True)
class Dim:
    """One dim of a layout and the mesh axes that cut it, outermost first."""

    name: str
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name + ("/" + ",".join(self.axes) if self.axes else "")


@dataclass(frozen=True)
class Layout:
    """Where a value lives: its dims, the axes that cut them, and the sums that are not finished yet.

    ``sums`` holds mesh axes in a physical layout and dims in a logical one (which has a ``region``);
    ``mesh`` is the name of its mesh where there are several.
    """

    dims: tuple[Dim, ...]
    sums: tuple[str, ...] = ()
    region: str = ""
    mesh: str = ""

    def __str__(self) -> str:
        mesh = "@" + self.mesh if self.mesh else ""
        words = [self.region, *map(str, self.dims), *("+" + s for s in self.sums), mesh]
        return " ".join(filter(None, words)) or "whole"

    @property
    def letters(self) -> str:
        """The dims' names in order, as one string: ``"bsd"``."""
        return "".join(d.name for d in self.dims)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis that cuts a dim, in the order of the dims."""
        return tuple(a for d in self.dims for a in d.axes)

    def cut(self, name: str) -> tuple[str, ...]:
        """The axes that cut dim ``name``; ``()`` when it is whole or absent."""
        return next((d.axes for d in self.dims if d.name == name), ())

    def shard_shape(self, shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[int, ...]:
        """Return the shape of a device's block of a value of ``shape``, with these ``sizes`` of the axes."""
        if len(shape) != len(self.dims):
            raise ValueError(
                f"layout '{self}' has {len(self.dims)} dims but the shape {shape} has {len(shape)}"
            )
        out = []
        for dim, size in zip(self.dims, shape, strict=True):
            parts = math.prod(sizes[a] for a in dim.axes) if dim.axes else 1
            if size % parts:
                raise ValueError(
                    f"dim {dim.name} = {size} in '{self}' is not a multiple of {'·'.join(dim.axes)} = {parts}"
                )
            out.append(size // parts)
        return tuple(out)

    def _repr_svg_(self) -> str:
        from llmpar import draw

        return draw.layout(self)._repr_svg_()


WHOLE = Layout(())  # all of a value, of any dims


def block(layout: Layout, sizes: dict[str, int], at: dict[str, int]) -> tuple[int, ...]:
    """Return which block of every dim the device at ``at`` holds, counted from 0."""
    step = lambda index, axis: index * sizes[axis] + at[axis]
    return tuple(functools.reduce(step, dim.axes, 0) for dim in layout.dims)


def axes_of(cut: tuple[str, ...] | str | None) -> tuple[str, ...]:
    """Return the axes in one dim's entry of a PartitionSpec."""
    return () if cut is None else (cut,) if isinstance(cut, str) else tuple(cut)


_TOKEN = re.compile(r"\S+")
_MESH = re.compile(r"@([A-Za-z]\w*)\s*$")


@functools.cache
def parse_layout(text: str) -> Layout:
    """Read ``"b/dp,fsdp s/sp d +tp"``, or ``"stream b s d +m"``, or ``"whole"``."""
    return _layout(text, 0, len(text))


def _layout(text: str, start: int, end: int, shown: str = "") -> Layout:
    mesh = _MESH.search(text, start, end)
    end = mesh.start() if mesh else end
    region, sums = "", list[str]()
    dims, used = list[Dim](), dict[str, str]()

    def fail(at: int, token: str, why: str):
        raise NotationError(shown or text, at, at + len(token), why)

    def claim(axis: str, owner: str, at: int) -> str:
        if axis not in ORDER:
            fail(at, axis, f"unknown mesh axis '{axis}'; the axes are {' '.join(AXES)}")
        if axis in used:
            fail(at, axis, f"axis '{axis}' already {used[axis]}; an axis is used once in a layout")
        used[axis] = owner
        return axis

    for match in _TOKEN.finditer(text, start, end):
        token, at = match.group(), match.start()
        if token.startswith("+"):
            name = token[1:]
            if name in sums and name in DIMS:
                fail(at, token, f"dim '{name}' is summed over twice")
            sums.append(name if name in DIMS else claim(name, "carries an unfinished sum", at + 1))
            continue
        name, slash, axes = token.partition("/")
        if len(name) > 1 and not slash:
            if name == "whole" and len(_TOKEN.findall(text[start:end])) == 1 + bool(region):
                continue
            # letters, no axis, and not dims without spaces between them
            is_region = name.isalpha() and name not in (*AXES, "whole") and set(name) - set(DIMS)
            if region or dims or sums or not is_region:
                fail(
                    at,
                    token,
                    f"'{token}' is neither a dim (one letter, spaces between two) nor a region (which comes"
                    " first)",
                )
            region = name
            continue
        if name not in DIMS:
            fail(at, name or token, f"unknown dim '{name}'; the dims are {' '.join(DIMS)}")
        if name in (d.name for d in dims):
            fail(at, token, f"dim '{name}' appears twice")
        cuts, position = [], at + len(name) + 1
        for axis in axes.split(",") if slash else ():
            cuts.append(claim(axis, f"cuts '{name}'", position))
            position += len(axis) + 1
        if sums:
            fail(at, token, "dims come before unfinished sums")
        dims.append(Dim(name, tuple(cuts)))
    return Layout(tuple(dims), tuple(sums), region, mesh[1] if mesh else "")


# ----------------------------------------------------------------------------------------------------- arrows


KIND = {
    ("cut", ""): "all-gather",
    ("cut", "cut"): "all-to-all",
    ("+", "cut"): "reduce-scatter",
    ("+", ""): "all-reduce",
    ("", "cut"): "slice",
}
"""What moves when a mesh axis is in one place of the layout before and in another of the layout after: in an
unfinished sum (+), in a dim that it cuts, or in none. An arrow's moves run in this order: of several sums
those that cut a dim come first, so the others are of a smaller piece."""


@dataclass(frozen=True)
class Move:
    """A collective (or a local slice) over some mesh axes, and the dims that it gathers or cuts."""

    kind: str
    axes: tuple[str, ...]
    gathers: str = ""
    cuts: str = ""

    def __str__(self) -> str:
        where = f" {self.gathers} to {self.cuts}" if self.gathers and self.cuts else ""
        if not where and (self.gathers or self.cuts):
            where = f" on {self.gathers or self.cuts}"
        return f"{self.kind} over {','.join(self.axes)}{where}"


@dataclass(frozen=True)
class Arrow:
    """A movement across devices, from one layout of a value to another.

    Attributes:
        varying: of a plan's arrow (`Resolved.physical`): the axes over which values differ in the region
            where it ends.
        text: of a plan's arrow: its logical arrow, or what moves, such as ``gradient ffn d m``.
        wire: the dtype in which it travels, of `WIRES`; empty: that in which it is computed.
        gradient_wire: the same of its gradient, in the backward pass.
    """

    before: Layout
    after: Layout
    varying: tuple[str, ...] = field(default=(), compare=False)
    text: str = field(default="", compare=False)
    wire: str = ""
    gradient_wire: str = ""

    def __str__(self) -> str:
        words = str(self.before).split()
        if self.wire:
            moving = {axis for move in self.moves for axis in move.axes}
            carries = lambda word: moving & {*re.split("[/,+]", word)[1:]}
            words = [f"{word}:{self.wire}" if carries(word) else word for word in words]
        return f"{' '.join(words)} -> {self.after}"

    def name(self, backward: bool = False) -> str:
        """Return the name by which a census finds the arrow's collectives, or its gradient's: its text, if it
        has one, and the dtype in which it travels."""
        dtype = self.gradient_wire if backward else self.wire
        return f"{self.text} in {dtype}" if self.text and dtype else self.text or str(self)

    @property
    @functools.lru_cache(maxsize=16384)  # noqa: B019 plans make the same arrows again and again
    def moves(self) -> tuple[Move, ...]:
        """The collectives that carry the arrow out, by `KIND` and in its order."""
        if self.before.mesh != self.after.mesh:
            raise ValueError(
                f"arrow '{self}' goes to another mesh, which no collective of one mesh does; use"
                " llmpar.two_meshes"
            )
        moving: dict[tuple[str, str, str], list[str]] = {}
        place = lambda name: "cut" if name in DIMS else name  # as `KIND` has it
        before = {a: d.name for d in self.before.dims for a in d.axes} | dict.fromkeys(
            self.before.sums, "+"
        )
        after = {a: d.name for d in self.after.dims for a in d.axes} | dict.fromkeys(
            self.after.sums, "+"
        )
        for axis in sorted(before.keys() | after.keys(), key=[*ORDER, *before, *after].index):
            old, new = before.get(axis, ""), after.get(axis, "")
            if old == new:
                continue
            if new == "+":
                raise ValueError(
                    f"arrow '{self}' would start an unfinished sum over {axis}: only computing does that"
                )
            kind = KIND[place(old), place(new)]
            moving.setdefault((kind, old.strip("+"), new), []).append(axis)
        # A move names its axes in the order in which they nest in its dim.
        nested = [*self.before.axes, *self.after.axes, *ORDER, *before]
        moves = [
            Move(kind, tuple(sorted(axes, key=nested.index)), old, new)
            for (kind, old, new), axes in moving.items()
        ]
        # where a dim gives axes to two others, its innermost go first
        outer = lambda move: (
            self.before.cut(move.gathers).index(move.axes[0]) if move.gathers else 0
        )
        moves.sort(key=lambda move: ([*KIND.values()].index(move.kind), -outer(move)))
        self._check_nesting(moves)
        return tuple(moves)

    def _check_nesting(self, moves: list[Move]) -> None:
        """Refuse moves that do not end in the layout after: each acts on a dim's innermost axes."""
        cuts = {d.name: d.axes for d in self.before.dims}
        for move in moves:
            if move.gathers:
                outer, inner = (
                    cuts[move.gathers][: -len(move.axes)],
                    cuts[move.gathers][-len(move.axes) :],
                )
                cuts[move.gathers] = outer if inner == move.axes else ("?",)  # refused below
            if move.cuts:
                cuts[move.cuts] = cuts.get(move.cuts, ()) + move.axes
        for name in self.after.letters or self.before.letters:
            if cuts.get(name, ()) != self.after.cut(name):
                raise ValueError(
                    f"arrow '{self}' would reorder the blocks of {name}: only a dim's innermost axes can"
                    f" move; write two arrows, with {name} whole in between"
                )


@functools.cache
def parse_arrow(text: str) -> Arrow:
    """Read ``"b s d +tp -> b s/tp d"``."""
    left, arrow, _ = text.partition("->")
    if not arrow or text.count("->") > 1:
        raise NotationError(
            text, len(left.rstrip()), len(text), "an arrow has one '->' between two layouts"
        )
    # the dtypes behind axes, such as :bf16 in d/fsdp:bf16 or +dp:bf16
    wires = {match[2]: match for match in re.finditer(r"[/+]\S*?(:(\S*))", left)}
    for name, match in wires.items():
        if name not in filter(None, WIRES.values()):
            raise NotationError(text, *match.span(1), "the dtypes on arrows are bf16 and e4m3")
        left = left.replace(match[1], " " * len(match[1]))
    plain = left + text[len(left) :]
    before, after = (
        _layout(plain, 0, len(left), text),
        _layout(plain, len(left) + 2, len(plain), text),
    )
    if before.dims and after.dims and before.letters != after.letters:
        raise NotationError(
            text,
            len(left) + 2,
            len(text),
            f"the dims on both sides differ: '{before.letters}' and '{after.letters}'",
        )
    if bool(before.mesh) != bool(after.mesh):
        why = "an arrow names a mesh on both sides, or on neither"
        raise NotationError(text, len(left) + 2, len(text), why)
    if wires and before.mesh:
        raise NotationError(
            text, 0, len(left), "between two meshes values travel in their own dtype"
        )
    result = Arrow(before, after, wire=next(iter(wires), ""))
    if wires and str(result).split() != text.split():
        raise NotationError(text, 0, len(left), f"a dtype is on all axes that move: '{result}'")
    return result
