"""Mesh strings: ``dp=2 fsdp=-1 tp=4`` names the sizes of mesh axes, at most one of them to be inferred."""

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from llmpar.files import refuse_first

AXES = {
    "pp": "pipeline stages",
    "dp": "data parallel replicas",
    "fsdp": "data parallel with sharded state",
    "ep": "experts; batch for dense layers",
    "sp": "context parallelism: positions",
    "tp": "tensor parallelism",
}
"""The mesh axes, slow links outermost, fast links innermost."""
INNER_AXES = {"ep": "near", "sp": "ul", "tp": "kv"}
"""The inner parts of three axes, which no user's mesh names (`llmpar.plan.plan`)."""
USER_AXIS = {part: axis for axis, part in INNER_AXES.items()}
"""The axis of an inner part, by which a user knows it."""
ORDER = tuple(part for axis in AXES for part in (axis, INNER_AXES.get(axis)) if part)
"""The axes of layouts, slow links outermost."""

POSITIONAL = {3: ("dp", "fsdp", "tp"), 4: ("dp", "fsdp", "tp", "sp")}
"""Axis order of unnamed mesh strings: three numbers as in EasyLM (dp, fsdp, mp), four as in LWM (dp, fsdp,
tp, sp)."""


class NotationError(ValueError):
    """A text that is no layout, arrow or mesh. The message shows it with a caret under the bad token."""

    def __init__(self, text: str, start: int, end: int, why: str):
        line = "".join(x if x.isprintable() else " " for x in text)
        super().__init__(f"{why}\n  {line}\n  {' ' * start}{'^' * max(1, end - start)}")


@dataclass(frozen=True)
class MeshShape:
    """The sizes of the six mesh axes, and of the inner parts of three of them (`INNER_AXES`).
    ``reshape`` (a leading ``!``) keeps devices in plain row-major order."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    sp: int = 1
    tp: int = 1
    reshape: bool = False
    near: int = 1
    ul: int = 1
    kv: int = 1

    @property
    def user_sizes(self) -> dict[str, int]:
        """Axis name to size as a user writes them, in link order."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def named(self) -> dict[str, int]:
        """The same without axes of one device: those that its text names."""
        return {axis: n for axis, n in self.user_sizes.items() if n > 1}

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name to size, in link order. An axis with an inner part is two: ``tp``, inside it ``kv``."""
        sizes = self.user_sizes | {part: getattr(self, part) for part in INNER_AXES.values()}
        sizes |= {axis: sizes[axis] // sizes[part] for axis, part in INNER_AXES.items()}
        return {axis: sizes[axis] for axis in ORDER if axis in AXES or sizes[axis] > 1}

    def live(self, *axes: str) -> tuple[str, ...]:
        """Those of ``axes`` that have more than one device: the others must leave no trace in the program."""
        return tuple(a for a in axes if self.sizes.get(a, 1) > 1)

    def along(self, axes: Iterable[str]) -> int:
        """The number of devices along ``axes``, and of the parts into which they cut a dim."""
        return math.prod(self.sizes[a] for a in axes)

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.user_sizes.values())

    def __str__(self) -> str:
        named = " ".join(f"{a}={n}" for a, n in self.named.items())
        return ("!" if self.reshape else "") + (named or "dp=1")


def parse_mesh(text: str | MeshShape, num_devices: int | None = None) -> MeshShape:
    """Read ``"dp=2 fsdp=-1 tp=4"``, ``"dp:2,fsdp:-1,tp:4"``, ``"1,64,4,1"`` (dp,fsdp,tp,sp) or ``"1,-1,4"``
    (dp,fsdp,tp).

    One axis may be ``-1``: the rest of ``num_devices``. The product may be smaller than ``num_devices``,
    never larger.
    """
    if isinstance(text, MeshShape):
        if num_devices is None and -1 not in text.user_sizes.values():
            return text  # with the sizes that it knows
        shape = _fit(
            str(text),
            {a: n for a, n in text.user_sizes.items() if n != 1},
            num_devices,
            text.reshape,
        )
        return replace(shape, near=text.near, ul=text.ul, kv=text.kv)
    if not isinstance(text, str):
        raise ValueError(
            f"a mesh is text, and this is {text!r:.60}; write for instance 'dp=2 fsdp=2 tp=2'"
        )
    body = text.strip()
    reshape = body.startswith("!")
    offset = text.index(body) + reshape if body else 0
    sizes: dict[str, int] = {}
    tokens = [(m.group(), m.start()) for m in re.compile(r"[^\s,]+").finditer(text, offset)]
    if not tokens:
        raise NotationError(text, 0, 1, "an empty mesh; write for instance 'dp=2 fsdp=2 tp=2'")
    positional = all(re.fullmatch(r"-?\d+", token) for token, _ in tokens)
    if positional and len(tokens) not in POSITIONAL:
        raise NotationError(
            text,
            offset,
            len(text),
            f"{len(tokens)} unnamed sizes; give 4 (dp,fsdp,tp,sp) or 3 (dp,fsdp,tp), or name the axes:"
            " 'dp=2 tp=4'",
        )
    for index, (token, at) in enumerate(tokens):
        fail = functools.partial(NotationError, text, at, at + len(token))
        name, _, value = token.replace(":", "=").partition("=")
        if positional:
            name, value = POSITIONAL[len(tokens)][index], token
        name = {"mp": "tp"}.get(name, name)
        is_size = re.fullmatch(r"-1|0*[1-9]\d*", value)
        refuse_first(
            (name not in AXES, f"unknown mesh axis '{name}'; the axes are {' '.join(AXES)}"),
            (name in sizes, f"axis '{name}' is given twice"),
            (not is_size, f"the size of '{name}' must be a positive number or -1"),
            (value == "-1" and -1 in sizes.values(), "two axes are -1; only one can be inferred"),
            error=fail,
        )
        sizes[name] = int(value)
    return _fit(text, sizes, num_devices, reshape)


def _fit(text: str, sizes: dict[str, int], num_devices: int | None, reshape: bool) -> MeshShape:
    free = next((a for a, n in sizes.items() if n == -1), None)
    known = math.prod(n for n in sizes.values() if n != -1)
    if num_devices is None:
        if free:
            raise ValueError(
                f"mesh '{text}' leaves {free} to be inferred, which needs the number of devices"
            )
        num_devices = known
    if free and num_devices % known == 0:
        sizes = sizes | {free: num_devices // known}
    elif free or known > num_devices:
        need = f"a multiple of {known} devices" if free else f"{known} devices"
        suggestion = near_meshes(sizes, num_devices)[0]
        raise ValueError(
            f"mesh '{text}' needs {need} but {num_devices} are present; try '{suggestion}'"
        )
    return MeshShape(reshape=reshape, **sizes)  # type: ignore[arg-type]


def near_meshes(sizes: dict[str, int], num_devices: int) -> list[MeshShape]:
    """Every mesh over these axes that fills ``num_devices``, nearest to ``sizes`` first (-1 fits any)."""
    meshes: list[dict[str, int]] = [{}]
    for axis in sizes:
        meshes = [
            o | {axis: n} for o in meshes for n in divisors(num_devices // math.prod(o.values()))
        ]
    meshes = [o for o in meshes if math.prod(o.values()) == num_devices]
    meshes.sort(key=lambda o: mesh_distance(o, sizes))
    return [MeshShape(**o) for o in meshes]  # type: ignore[arg-type]


def mesh_distance(sizes: dict[str, int], wanted: dict[str, int]) -> float:
    """Count the doublings and halvings that make these sizes of the wanted ones."""
    return sum(
        abs(math.log2(n / wanted[a])) if wanted[a] > 0 else 0.1 * (n == 1) for a, n in sizes.items()
    )


def divisors(n: int) -> list[int]:
    """Every divisor of ``n``, ascending."""
    return sorted({d for i in range(1, math.isqrt(n) + 1) if n % i == 0 for d in (i, n // i)})
