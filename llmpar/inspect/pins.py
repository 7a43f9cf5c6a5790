"""Keep what a program sends in a small file beside its test, and fail where a change sends otherwise.

A line of the file is a row of `look.Look`. Rows are the same if file, types, collective, axes and pass are:
the number of a line moves with every edit above it.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from llmpar.draw.page import html_page, html_part, page_table
from llmpar.files import read_text
from llmpar.inspect.census import text_columns
from llmpar.inspect.hlo import COLLECTIVES

UPDATE_PINS = "LLMPAR_UPDATE_PINS"
"""Set to 1, all pins are written anew."""
TITLES = "line", "moves", "collective", "pass", "times", "a device sends"
_TYPE = re.compile(r"\w+\[[^\]]*\](\{[^}]*\})?")
# A move in the letters that `look` was given, and the axes of a move.
_LETTERED = re.compile(r"(([A-Za-z](/\w+(,\w+)*)?|\+\w+|->)( |$)){3,}")
_AXES = re.compile(r"(?<=[@(,:/+])[A-Za-z_]\w*")
_HEAD = re.compile(r"# .* on .* sends, per device and run\n")
_pinned = dict[Path, str]()  # by its file the function that this process pinned
Words = tuple[str, ...]
"""A row as words, one for each of `TITLES`."""


def words_of(rows: Iterable[Mapping[str, Any]]) -> list[Words]:
    """Write rows of a look as words; ``-`` where there is nothing to write."""
    return [
        (
            row["source"] or "(the partitioner's)",
            row["letters"] or row["arrow"] or "-",
            f"{row['collective']} {','.join(row['axes'])}",
            row["direction"] or "-",
            _times(row),
            f"{row['bytes_sent']:,} B",
        )
        for row in rows
    ]


def _times(row: Mapping[str, Any]) -> str:
    """Write how often a row is carried out."""
    if row["conditional"] and not row["count"]:
        return "in another branch"
    return f"×{row['count']:,}{' per iteration' * bool(row['per_turn'])}{' at most' * row['conditional']}"


def markdown(rows: Iterable[Words], titles: Words = TITLES) -> str:
    """Write rows of words as a table in GitHub's Markdown."""
    code = lambda word: f"`{word}`" if re.search(r"[\[{_:]", word) else word
    lines = [titles, ("---",) * len(titles), *(tuple(map(code, row)) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


@dataclass(frozen=True)
class Difference:
    """State what one program sends otherwise than another. It is false where there is nothing. ``pairs`` has
    all rows of both, those that are in one of them beside empty words."""

    pairs: list[tuple[Words, Words]]
    names: tuple[str, str] = ("before", "after")

    @property
    def lines(self) -> list[Words]:
        """Return the rows that differ, marked: ``+`` new, ``-`` gone, ``~`` of other counts and bytes."""
        lines = list[Words]()
        for one, words in self.pairs:
            if not any(one):
                lines.append(("+", *words, "new"))
            elif not any(words):
                lines.append(("-", *one, "gone"))
            elif one[4:] != words[4:]:
                lines.append(("~", *words, f"was {' '.join(one[4:])}"))
        return lines

    def __bool__(self) -> bool:
        return bool(self.lines)

    def __str__(self) -> str:
        return text_columns(self.lines) if self else "both send the same"

    __repr__ = __str__

    def markdown(self) -> str:
        """Write the lines as a table for a comment on GitHub."""
        return markdown(self.lines, ("", *TITLES, "")) if self else f"{self}\n"

    def html(self, file: str | os.PathLike) -> "Difference":
        """Write a page of one file with both programs side by side."""
        Path(file).write_text(html_page("What differs", self._repr_html_()), encoding="utf-8")
        return self

    def _repr_html_(self) -> str:
        cells = [[_cell(*pair), _cell(*reversed(pair))] for pair in self.pairs]
        head = f"{len(self.lines)} moves differ" if self else str(self)
        head += f": {self.names[0]} on the left, {self.names[1]} on the right"
        return html_part(head, page_table(("before", "after"), cells, ("half", "half")))


def _cell(words: Words, other: Words) -> str:
    """Write one program's row; marked is what the other program does otherwise."""
    if not any(words):
        return ""
    line, arrow, *sent, size = (escape(word.replace(" B", "\u00a0B")) for word in words)
    rest = ", ".join(word for word in sent if word != "-")
    code = f"<code>{line}</code><br><code>{arrow}</code><br>{rest}: <b>{size}</b>"
    return code if words[1:] == other[1:] else f"<mark>{code}</mark>"


def difference(
    before: list[Words], after: list[Words], names: tuple[str, str] = ("before", "after")
) -> Difference:
    """Compare two tables. Of rows that are the same, those of the same counts and bytes are paired first."""
    key = lambda words: (re.sub(r":\d+$", "", words[0]), *words[1:4])
    rest, empty, pairs = list(before), ("",) * len(TITLES), list[tuple[Words, Words]]()
    for words in after:
        same = [one for one in rest if key(one) == key(words)]
        one = max(same, key=lambda one: one[4:] == words[4:], default=empty)
        pairs.append((one, words))
        if same:
            rest.remove(one)
    return Difference(pairs + [(words, empty) for words in rest], names)


def check_pin(
    name: str, mesh: Mapping[str, int], after: list[Words], file: str | os.PathLike
) -> None:
    """Write a table into ``file`` if that is not there, or `UPDATE_PINS` is set; else compare them.

    Raises:
        AssertionError: the program sends otherwise, line by line; or the file is missing where CI is set.
        ValueError: the file is no pin, or of another mesh, or of another function, unless that has
            another name now: `UPDATE_PINS` is set, and this process pinned no other one to it.
    """
    __tracebackhide__ = True  # pytest shows the line of the test
    path, update = Path(file), os.environ.get(UPDATE_PINS) == "1"
    is_ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    on = " ".join(f"{axis}={n}" for axis, n in mesh.items()) or "one device"
    kept = read_text(path, "pin").splitlines() if path.exists() else []
    is_same = not kept or " on " not in kept[0] or kept[0].startswith(f"# {name} on ")
    if not is_same and (not update or _pinned.get(path.resolve(), name) != name):
        raise ValueError(
            f"'{path}' says '{kept[0][2:]}', and this is {name}; use a file for each function, or if that"
            " was renamed, pytest --update-pins"
        )
    _pinned[path.resolve()] = name
    if update or not path.exists():
        if not update and is_ci:
            raise AssertionError(
                f"'{path}' is missing, and CI writes no pins: run the test elsewhere, and commit"
                " the file"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{text_columns(after)}\n" if after else ""
        path.write_text(f"# {name} on {on} sends, per device and run\n{text}")
        return
    first, *lines = kept or [""]
    before: list[Words] = [tuple(re.split(" {2,}", line.strip())) for line in lines if line]
    if not first.startswith("# ") or {*map(len, before)} - {len(TITLES)}:
        raise ValueError(f"'{path}' is no pin; remove it, and the test writes one")
    if f" on {on} sends" not in first:
        raise ValueError(
            f"'{path}' says '{first[2:]}', and this is on {on}; use a file for each mesh"
        )
    if changes := difference(before, after):
        raise AssertionError(
            f"{name} sends otherwise than '{path}' says:\n{changes}\nif that is meant:"
            f" pytest --update-pins, or {UPDATE_PINS}=1, and commit the file"
        )


def unused_pins() -> list[Path]:
    """List the pins beside those of this process that it has not used: their tests may be gone."""
    near = {(path.parent, path.suffix) for path in _pinned}
    files = sorted(x for folder, kind in near for x in folder.glob(f"*{kind}") if x not in _pinned)
    return [x for x in files if x.is_file() and _HEAD.match(x.read_text(errors="replace"))]


def matching(
    mesh: Mapping[str, int],
    rows: list[dict[str, Any]],
    what: str,
    over: str | None,
    partly: bool = False,
) -> list[dict[str, Any]]:
    """Return the rows whose collective or types are ``what``, over an axis; with ``partly`` also those whose
    groups fill no whole axes. Raises ValueError for words that no row could have, so that a misspelt
    assertion does not hold in silence."""
    is_typed = "[" in what and all(map(_TYPE.fullmatch, what.split(" -> ")))
    moves = (is_typed or _LETTERED.fullmatch(what)) and {*_AXES.findall(what)} <= {*mesh}
    known = *COLLECTIVES, *(row[key] for row in rows for key in ("arrow", "letters"))
    if what not in known and not moves:
        raise ValueError(
            f"'{what}' is no collective; use {', '.join(COLLECTIVES)}, or types as look prints them"
        )
    if over is not None and over not in mesh:
        raise ValueError(f"the mesh has no axis '{over}'; it has {', '.join(mesh)}")
    along = [
        row for row in rows if over in (None, *row["axes"]) or partly and "other" in row["axes"]
    ]
    return [row for row in along if what in (row["collective"], row["arrow"], row["letters"])]
