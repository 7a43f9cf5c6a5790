"""Read the small files that people write or are given: a model's configuration, a chip, a site, answers.

Whatever is at a path, reading it ends, and a refusal is one sentence that names the file: ``cannot read the
site file 'x.toml': it is a folder; name a file``.
"""

import functools
import json
import math
import numbers
import os
import stat
import tomllib
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

SMALL_FILE_BYTES = 16 << 20
"""The largest size that is read: twice that of the longest index of a model's weights."""
Path = str | os.PathLike[str]


def refuse(path: Path, what: str, why: str) -> NoReturn:
    """Refuse a file in one sentence. ``what`` names its purpose, as 'site file'."""
    raise ValueError(f"cannot read the {what} '{os.fspath(path)}': {why}") from None


def check_ordinary(path: Path, what: str) -> None:
    """Refuse what is not an ordinary file: opening a pipe would wait for a writer."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        refuse(path, what, f"{error.strerror}; give the path of a file that is there")
    except ValueError:  # a NUL in its name
        refuse(path, what, "that is no name of a file")
    if stat.S_ISDIR(mode):
        refuse(path, what, "it is a folder; name a file")
    if not stat.S_ISREG(mode):
        refuse(
            path,
            what,
            "it is no ordinary file but a pipe or a device; write what it gives to a file",
        )


def read_text(path: Path, what: str) -> str:
    """Return the text of a small file, which must be UTF-8, without a byte order mark."""
    check_ordinary(path, what)
    try:
        with open(path, "rb") as file:
            raw = file.read(SMALL_FILE_BYTES + 1)
        if len(raw) > SMALL_FILE_BYTES:
            refuse(
                path, what, f"it has more than {SMALL_FILE_BYTES >> 20} MiB; give a smaller file"
            )
        return raw.decode().removeprefix("\ufeff")
    except OSError as error:
        refuse(path, what, f"{error.strerror}; give a file that can be read")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        refuse(path, what, f"it is not UTF-8 text: {byte}; save it as UTF-8")


def read_json(path: Path, what: str, kind: type = dict) -> Any:
    """Return the value of a JSON file, of type ``kind``: an object by default."""
    return _parsed(path, what, "JSON", kind, lambda: json.loads(read_text(path, what)))


def read_json_lines(path: Path, what: str) -> list[dict]:
    """Return the objects of a file with one JSON object per line; empty lines are skipped."""
    # not splitlines: a string may hold U+2028
    lines = enumerate(read_text(path, what).split("\n"), 1)
    return [
        _parsed(path, what, f"JSON in line {number}", dict, lambda: json.loads(line))  # noqa: B023
        for number, line in lines
        if line.strip()
    ]


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return the table of a TOML file."""
    return _parsed(path, what, "TOML", dict, lambda: tomllib.loads(read_text(path, what)))


def _parsed(path: Path, what: str, form: str, kind: type, parse: Callable[[], Any]) -> Any:
    try:
        value = parse()
    except RecursionError:
        refuse(path, what, "it is nested too deeply")
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        refuse(path, what, f"it is no {form}: {error}")
    except ValueError as error:
        if str(error).startswith("Exceeds the limit"):  # of digits, by Python
            refuse(path, what, "it holds a number of too many digits")
        raise
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "an object"
        refuse(path, what, f"it holds {json.dumps(value):.40}, not {wanted} ({form})")
    return value


class Allowed(NamedTuple):
    """State what a value may be: of a type, between two bounds, or one of the choices; with ``none`` also
    None."""

    kind: type
    least: float = -math.inf
    most: float = math.inf
    none: bool = False
    choices: tuple = ()

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError if the value is not allowed."""
        if value is None and self.none:
            return
        if any(type(value) is type(choice) and value == choice for choice in self.choices):
            return
        number = self.kind in (int, float)
        kind = {int: numbers.Integral, float: numbers.Real}.get(self.kind, self.kind)
        fits = isinstance(value, kind) and isinstance(value, bool) == (self.kind is bool)
        if fits and not self.choices and (not number or self.least <= value <= self.most):
            return
        words: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false"}
        what = (words | {str: "a text", list: "a list", dict: "an object"})[self.kind]
        if self.choices:
            what = " or ".join(map(json.dumps, self.choices))
        elif self.least == self.most:
            what = f"{self.least:g}, the only one that is implemented"
        elif number:
            bounds = [
                f"{bound:,}" if self.kind is int else f"{bound:g}"
                for bound in (self.least, self.most)
            ]
            what += f" from {bounds[0]}" * (self.least > -math.inf)
            what += f" to {bounds[1]}" * (self.most < math.inf)
        shown = json.dumps(value, default=repr)
        raise ValueError(f"{name} is {shown:.60}; use {what}" + " (or null)" * self.none)


@functools.cache
def allowed(config_type: type) -> dict[str, Allowed]:
    """Return what the fields of a dataclass may be, by their types: `Annotated` by an `Allowed`, a `Literal`,
    a bool, a str, or an int from 1. Other types allow all values."""
    fields = dict[str, Allowed]()
    for name, hint in get_type_hints(config_type, include_extras=True).items():
        plain, *rest = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if hasattr(hint, "__metadata__"):
            fields.update((name, x) for x in hint.__metadata__ if isinstance(x, Allowed))
        elif get_origin(hint) is Literal:
            fields[name] = Allowed(str, choices=get_args(hint))
        elif plain in (bool, int, str):
            fields[name] = Allowed(plain, 1 if plain is int else -math.inf, none=bool(rest))
    return fields


def check_fields(config: Any) -> None:
    """Refuse a field's value that its type does not allow: a misspelt choice would silently be another.
    Defaults (the class' own attributes) are not checked."""
    config_type: Any = type(config)
    for name, what in allowed(config_type).items():
        if (value := getattr(config, name)) is not getattr(config_type, name, config_type):
            what.check(name, value)


def refuse_first(*rows: tuple[Any, str], error: Callable[[str], ValueError] = ValueError) -> None:
    """Raise an error with the sentence of the first row whose condition holds."""
    for holds, why in rows:
        if holds:
            raise error(why)


class CheckedFields:
    """A dataclass that refuses values which the types of its fields do not allow (`check_fields`)."""

    def __post_init__(self) -> None:
        check_fields(self)
