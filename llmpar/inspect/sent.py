"""State what a program sends and computes, line by line, from its text. No JAX is needed."""

import functools
import itertools
import math
import operator
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llmpar import draw
from llmpar.draw.page import html_page, html_part
from llmpar.draw.scene import Scene, size_text
from llmpar.inspect import letters, pins
from llmpar.inspect.census import (
    Collective,
    census_hlo,
    collective,
    flops_in,
    product_flops,
    summed,
    text_columns,
)
from llmpar.inspect.drawn import facts_html, moves_html, schedule_html, words_of_time
from llmpar.inspect.hlo import CALLS, Instruction, Module, integers, parsed
from llmpar.inspect.moves import read_mesh

_HIDDEN = (
    r'(?:^(?=convolution)|custom_call_target="(?!Sharding|SPMD|xla\.sdy|annotate_|__cublas|AsyncCollective'
    r'|PrepareAsyncCall|AllocateBuffer))([^"\s]+)'
)
LAST = (
    "the compiler may have merged, split and widened collectives here, and a text from its cache may name old"
    " lines; look at the function instead"
)
LOOPS = "loops"  # in a table of lines, those of all loops


@dataclass(frozen=True, repr=False)
class Look:
    """State what one run of a program does on each device; bytes are those of one device.

    Attributes:
        rows: what each line sends, largest first: ``source``, ``arrow`` (the types of operand and result,
            whole along ``axes``: ``f32[64@X,128] -> f32[64,128]``), ``letters`` (the same with the letters
            of ``dims``, ``d/X m -> d m``; '' where they are not certain), ``collective``, ``axes``,
            ``count``, ``bytes_sent``, ``per_turn`` (the loop around it whose trip count is unknown: count and
            bytes are those of one iteration; or ''), ``conditional`` (in the branch that sends most),
            ``link``, ``dtype``, ``shape`` (of the result), ``direction``; with a profile ``measured``.
        memory: argument, output, alias, temp and peak bytes, as the compiler reserves them; {} for a text.
        replicated: values that are equal on several devices although ``axes`` could cut them: ``bytes`` of
            each, and the bytes ``saved`` by the cut.
        unordered: pairs of collectives without a data dependency between them.
        notes: what could not be read, and why.
        cheaper: the reshards that send less by another sequence of moves (`reshard.cheaper`): ``source``,
            ``count``, ``bytes_sent`` and ``instead_of`` as both are compiled, ``expression``.
        cure: where `look` is to find it, the line with which the program sends least (`look.find_cure`):
            ``source`` (the line that it follows), ``expression``, ``bytes_sent``, ``instead_of``,
            ``peak_bytes``; {} if none helps.
        schedule: the compiled program in its order, and what is alive in it (`schedule.read_schedule`);
            {} for a text that is not scheduled.
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
    cure: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        rest = [f"{name}: {text}" if name else text for name, text in self._facts()]
        return "\n".join([self._heading(), *[self._sent()] * bool(self.rows), *rest])

    __repr__ = __str__

    def _heading(self) -> str:
        """Write the line above the rows."""
        on = " ".join(f"{a}={n}" for a, n in self.mesh.items()) or "one device"
        if self.rows:
            return f"{self.name} on {on} sends, per device and run:"
        partly = any(re.match("not counted: .* sends$", text) for text in self.notes)
        return f"{self.name} on {on} sends nothing" + (" that is counted" if partly else "")

    def _facts(self) -> list[tuple[str, str]]:
        """Write the lines that follow the rows, each as a name or '', and what it says."""
        facts = list[tuple[str, str]]()
        for row in self.cheaper:
            less, sent = f"{row['bytes_sent']:,} B", f"{row['instead_of']:,} B"
            text = f"{row['source']}  {row['expression']}  {less}, not {sent}"
            facts.append(("cheaper", text))
        if line := self.cure:
            change = f"in all {line['bytes_sent']:,} B, not {line['instead_of']:,} B"
            facts.append(("cure", f"after {line['source']}  {line['expression']}  {change}"))
        if loops := sorted({row["per_turn"] for row in self.rows} - {""}):
            where = f"the trip count of the loop at {', '.join(loops)} is unknown: not in the sum"
            facts.append(("", where))
        for link in dict.fromkeys(self.links.values()):
            axes = [a for a, other in self.links.items() if other == link]
            facts.append((", ".join(axes), link))
        if sizes := [f"{name[:-6]} {size_text(n)}" for name, n in self.memory.items()]:
            facts.append(("memory", ", ".join(sizes)))
        facts.append(("matmuls", f"{self.flops:,} FLOPs"))
        for row in self.replicated:
            over = f" could be cut over {', '.join(row['axes'])}:" if row["axes"] else ""
            size, saved = size_text(row["bytes"]), size_text(row["saved"])
            facts.append(("replicated", f"{row['name']}, {size};{over} {saved} less"))
        for a, b in self.unordered[:1]:
            pairs = f"(pairs: {len(self.unordered)})"
            facts.append(("", f"no data dependency orders {a} and {b} {pairs}"))
        return facts + [("note", text) for text in self.notes]

    def _sent(self) -> str:
        """Write the rows as aligned text, with the sum of those whose loops have a known trip count."""
        sent = sum(row["bytes_sent"] for row in self.rows if not row["per_turn"])
        rows = [*pins.words_of(self.rows), ("in all", "", "", "", "", f"{sent:,} B")]
        passes = any(row["direction"] for row in self.rows)
        cells = [(*words[:3], *words[3:4] * passes, *words[4:]) for words in rows]
        if any("measured" in row for row in self.rows):
            times = [*map(words_of_time, self.rows), ("",) * 5]
            cells = [(*words, *more) for words, more in zip(cells, times, strict=True)]
        return text_columns(cells)

    def pin(self, file: str | os.PathLike) -> "Look":
        """Keep what is sent in a file: written the first time, compared afterwards.

        Raises AssertionError, line by line, where the program sends otherwise. With ``pytest --update-pins``,
        or with ``LLMPAR_UPDATE_PINS=1``, the file is written anew; with ``CI`` a missing file fails.
        """
        __tracebackhide__ = True  # pytest shows the line of the test
        pins.check_pin(self.name, self.mesh, pins.words_of(self.rows), file)
        return self

    def bytes_of(self, what: str, over: str | None = None) -> int:
        """Return what a device sends by a collective ("all-reduce") or in a move ("f32[8@X] -> f32[8]"), of
        all axes or ``over`` one. Raises ValueError for what no program has, so that no assertion holds by a
        misspelt word."""
        return sum(row["bytes_sent"] for row in pins.matching(self.mesh, self.rows, what, over))

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
        before, after = pins.words_of(other.rows), pins.words_of(self.rows)
        return pins.difference(before, after, (other.name, self.name))

    def markdown(self) -> str:
        """Write the rows as a table in GitHub's Markdown, for a comment."""
        return pins.markdown(pins.words_of(self.rows))

    def document(self) -> dict[str, Any]:
        """Return the look as plain data, for JSON."""
        return asdict(self)

    def picture(self) -> Scene:
        """Draw the bytes of each line."""
        name = lambda row: (
            f"{row['source'] or '(the partitioner)'} {row['letters'] or row['arrow']}".strip()
        )
        rows = [
            row | {"arrow": name(row), "axis": ",".join(row["axes"]), "kind": row["collective"]}
            for row in self.rows
        ]
        return draw.arrows_sent(rows)

    def html(self, file: str | os.PathLike) -> "Look":
        """Write a page of one file: what is sent, by pass and biggest first, each move drawn."""
        Path(file).write_text(html_page(self.name, self._repr_html_()), encoding="utf-8")
        return self

    def _repr_html_(self) -> str:
        parts = list[str]()
        sent = lambda rows: sum(row["bytes_sent"] for row in rows if not row["per_turn"])
        for name in dict.fromkeys(row["direction"] for row in self.rows):
            rows = [row for row in self.rows if row["direction"] == name]
            # what has no backward pass is one group, and needs no heading
            title = f"<h2>{name or 'in neither pass'}: {size_text(sent(rows))}</h2>"
            parts.append(title * (len(rows) < len(self.rows)) + moves_html(rows, self.mesh))
        parts.append(facts_html(self._facts()))
        if self.schedule:
            parts.append(schedule_html(self.schedule, self.mesh, self.memory))
        total = f" {size_text(sent(self.rows))}" if self.rows else ""
        return html_part(self._heading() + total, *parts)


def look_at_text(
    text: str,
    mesh: Any = None,
    links: dict[str, str] | None = None,
    dims: Mapping[str, str] | None = None,
) -> Look:
    """Look at HLO text, whose devices are positions in ``mesh``, over whose axes are these ``links``.
    ``dims``: the letters of arguments' dims by name, as `look` takes them.

    Raises ValueError where the text is none, or is cut off, and where the mesh or letters do not fit."""
    if isinstance(mesh, str):
        mesh = read_mesh(mesh) if re.search(r"[=:]\s*\d", mesh) else None
    sizes = dict(getattr(mesh, "shape", mesh) or {})
    devices = parsed(text).devices
    if (n := math.prod(sizes.values())) != devices:
        has = f"mesh {sizes} has {n} devices" if sizes else "a text does not name its mesh"
        raise ValueError(
            f"{has}, and the program has {devices}; give its own: look(text, 'X=4 Y=2')"
        )
    places = SimpleNamespace(axis_names=tuple(sizes), shape=sizes)
    try:
        result = read_look(text, places, [], {}, links or {}, dims)
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"a part of the text is missing or damaged ({error!r:.80})"
        raise ValueError(f"{why}; give all that the compiler wrote") from error
    for row in (row for row in result.rows if row["axes"] == ("other",)):
        raise ValueError(
            f"mesh {sizes} is not the program's: groups of the {row['collective']} at"
            f" {row['source'] or 'no line'} fill no whole axes; give its own, or an axis of which"
            " they fill a part as two: X=4 as A=2 B=2"
        )
    return result


def read_look(
    text: str,
    mesh: Any,
    notes: list[str],
    lines: dict[str, set[str]],
    between: dict[str, str],
    dims: Mapping[str, str] | None = None,
) -> Look:
    """Read the text of a program. ``lines`` is what `kept_lines` returns, or {} where there is no jaxpr;
    ``between`` names the links of an axis, ``dims`` letters of arguments."""
    module = parsed(text)
    known = letters.followed(module, dims) if dims else {}
    notes = [*notes, LAST] if "is_scheduled=true" in text[: text.find("\n")] else [*notes]
    if module.devices == 1:
        mesh = None
    elif mesh is None:
        mesh = SimpleNamespace(axis_names=("device",), shape={"device": module.devices})
        notes.append(f"no mesh was found: all {module.devices} devices are one axis here")
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
            "letters": letters.in_letters(module, known, c.place, c.moves) if known else "",
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
    name = re.sub("^_lambda_?$", "<lambda>", module.name)
    sizes = dict(mesh.shape) if mesh else {}
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
        count = module.trips(comp, loop)
        where = module.source(loop) or "no line"
        if count is None:
            notes.append(
                f"the trip count of the loop at {where} is unknown: its FLOPs are of one iteration"
            )
        return 1 if count is None else count

    leaf = lambda comp, op: 0 if op.opcode == "convolution" else product_flops(module, comp, op)
    return int(flops_in(module, leaf, trips)(module.entry, None)), notes


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
            before[name] = functools.reduce(operator.or_, (before[n] for n in needs), 1 << place)
            callees = [x for x in op.called(*CALLS.get(op.opcode, ())) if x in module.computations]
            collectives = [(c, n, True) for callee in callees for c, n, _ in inside(callee)]
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
