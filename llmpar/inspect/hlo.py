"""Read the text of an HLO module: computations, trips of loops, groups of devices, source lines."""

import functools
import itertools
import math
import operator
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llmpar.draw.geometry import coordinates

# A type ends where the opcode begins; the group is atomic, so that a line is read once. Some texts have no %.
_OP = re.compile(
    r"\s*(ROOT )?%?([\w.\-]+) = ((?>\(.*?\)(?= [\w\-]+\()|\S+)) ([\w\-]+)\((.*?)\)((?:, .*)?)$"
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.* )?\{$")
_OPERAND = re.compile(r"(?:^|(?<=[ ,%/]))([A-Za-z_][\w.\-]*)(?:#(\d+))?(?=,|$)")
CALLS = {
    "while": ("condition", "body"),
    "conditional": ("branch_computations", "false_computation", "true_computation"),
    **dict.fromkeys(("call", "fusion", "async-start", "call-start"), ("calls", "to_apply")),
}
COLLECTIVES = tuple(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all"
    " collective-permute collective-broadcast send".split()
)
"""Collectives that are counted. A `recv` is the other end of a `send` that names source and target."""
Ref = tuple[str, int | None]
"""A value by name, or one part of a tuple."""
ROOT: Ref = ("", None)
MAX_TRIPS = 1_000_000  # counters are stepped, not solved: more trips than a training step has


class Instruction(NamedTuple):
    """Hold one line of a computation: the type of its result, its opcode, its operands and its attributes."""

    type: str
    opcode: str
    # in parentheses: operands, or the value of a constant, or the number of a parameter
    inside: str
    attrs: str

    @property
    def scope(self) -> str:
        """Return the named scopes in which it was traced; '' where the compiler does not name them."""
        match = re.search(r'op_name="(.*?)"', self.attrs)
        return match[1] if match else ""

    @property
    def results(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the dtypes and shapes of its results. The start of a collective returns its operands before
        them (of an all-reduce from JAX 0.12 on), as a tuple of their own where there is another number of
        them."""
        if self.opcode.endswith("-start") and self.type.startswith("(("):
            _, _, results = self.type.partition("), ")
            return (
                shapes(results.partition("), ")[0])
                if results.startswith("(")
                else shapes(results)[:1]
            )
        values, operands = shapes(self.type), len(self.operands)
        if self.opcode in ("send", "recv"):  # the message, and a handle
            return values[:1]
        started = self.opcode.endswith("-start") and len(values) >= 2 * operands
        return values[operands : 2 * operands] if started else values

    @property
    def operands(self) -> list[Ref]:
        """Return the operands' names: %x, or %x#1 where JAX 0.12 leaves out the get-tuple-element."""
        return _names(self.inside) if self.opcode != "constant" else []

    @property
    def collective(self) -> str:
        """Return which of `COLLECTIVES` it is or starts; '' for others, and for a send without a target."""
        kind = self.opcode.removesuffix("-start")
        no_target = kind == "send" and not _groups(self.attrs)
        return kind if kind in COLLECTIVES and not no_target else ""

    def called(self, *keys: str) -> list[str]:
        """List the computations that the attributes `keys` name."""
        matches = [re.search(rf"\b{key}=(\{{[^}}]*\}}|[^,\s]+)", self.attrs) for key in keys]
        return [name for m in matches if m for name in re.findall(r"[\w.\-]+", m[1])]


@functools.lru_cache(maxsize=1 << 14)  # a loop's counter is followed again in each of its turns
def _names(inside: str) -> list[Ref]:
    return [(name, int(index) if index else None) for name, index in _OPERAND.findall(inside)]


def integers(text: str, after: str = "") -> list[int]:
    """Read the whole numbers of a text, or those directly after the pattern `after`."""
    return [int(n) for n in re.findall(rf"{after}(\d+)", text)]


def shapes(type_text: str) -> list[tuple[str, tuple[int, ...]]]:
    """Read dtypes and shapes: `(f32[2,4]{1,0}, s32[])` is two."""
    matches = re.findall(r"([a-z]\w*)\[([^\]]*)\]", type_text)
    return [(dtype, tuple(integers(dims))) for dtype, dims in matches]


def values_bytes(values: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Sum the bytes of values of these dtypes and shapes; a token has none."""
    bits = lambda dtype: 8 if dtype == "pred" else (integers(dtype) or [0])[0]
    return sum(math.prod(shape) * bits(dtype) for dtype, shape in values) // 8


class Module:
    """Hold a module's computations, and evaluate as much as is needed to count the trips of loops."""

    def __init__(self, text: str):
        header = text[: text.find("\n")]
        self.name = header.partition(" ")[2].partition(",")[0].removeprefix("jit_")
        self.devices = math.prod(integers(header, "(?:num_partitions|replica_count)="))
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.roots: dict[str, str] = {}
        self.tables: dict[str, dict[int, str]] = {}  # FileNames, FileLocations, StackFrames
        name = self.entry = ""
        for line in text.splitlines():
            if name in self.computations and (m := _OP.match(line)):
                self.computations[name][m[2]] = Instruction(*m.groups()[2:])
                self.roots[name] = m[2] if m[1] else self.roots.get(name, "")
            elif m := _COMPUTATION.match(line):
                name = m[2]
                self.computations[name] = {}
                self.entry = name if m[1] else self.entry
            elif m := re.match(r"(\d+) (.+)", line):
                self.tables.setdefault(name, {})[int(m[1])] = m[2]
            elif re.fullmatch(r"[A-Z]\w+", line):
                name = line
        if not self.entry:
            raise ValueError(
                "expected the text of an HLO module, but no line of it begins with ENTRY"
                + "; this is StableHLO, what .compile().as_text() gives is HLO"
                * ("stablehlo." in text)
            )
        if len(re.findall("^}", text, re.M)) < len(self.computations):
            raise ValueError(f"the text is cut off, inside computation {name}; give all of it")

    @functools.cached_property
    def uncounted(self) -> list[str]:
        """Note what looks like a collective and is not counted, and what is counted as more than it may
        be."""
        ops = [op for ops in self.computations.values() for op in ops.values()]
        ends = lambda op: op.opcode.endswith(("-done", "-update")) or op.opcode in CALLS
        like = lambda op: re.match(_LIKE, op.opcode) or re.search(_PARTNERS, op.attrs)
        rest = [op for op in ops if like(op) and not op.collective and not ends(op)]
        counts = Counter(op.opcode for op in rest)
        counts["recv"] -= sum(op.collective == "send" for op in ops)  # the other end
        notes = [
            f"not counted: what {opcode} (×{n}) sends" for opcode, n in counts.items() if n > 0
        ]
        if any(op.collective == "ragged-all-to-all" for op in ops):
            notes.append(
                "a ragged-all-to-all sends as much as the data ask for: counted is a full result"
            )
        return notes

    @functools.cached_property
    def echoes(self) -> set[str]:
        """Name the computations that only repeat a TPU's collective, because it continues or ends in them."""
        ends = lambda comp: "AsyncCollectiveDone" in self.computations[comp][self.roots[comp]].attrs
        return {
            c
            for c, root in self.roots.items()
            if c.startswith("async_collective") or root and ends(c)
        }

    def shape_of(self, comp: str, op: Instruction, i: int) -> tuple[int, ...]:
        """Return the shape of an operation's operand ``i``."""
        name, index = op.operands[i]
        return shapes(self.computations[comp][name].type)[index or 0][1]

    @functools.cached_property
    def users(self) -> dict[tuple[str, str], list[str]]:
        """List the operations that take a value, by its computation and name."""
        users = defaultdict[tuple[str, str], list[str]](list)
        for comp, ops in self.computations.items():
            for value, name in (
                (value, name) for name, op in ops.items() for value, _ in op.operands
            ):
                users[comp, value].append(name)
        return users

    def source(self, op: Instruction) -> str:
        """Name an operation's line of Python, as `innermost` does."""
        # JAX before stack frames
        if m := re.search(r'source_file="(.*?)".*?source_line=(\d+)', op.attrs):
            return innermost([(m[1], int(m[2]))])
        frame = next(iter(integers(op.attrs, "stack_frame_id=")), 0)
        frames = []
        while frame in self.tables.get("StackFrames", ()):
            location, parent = integers(self.tables["StackFrames"][frame], "=")
            file, _, line, *_ = integers(self.tables["FileLocations"][location], "=")
            frames.append((self.tables["FileNames"][file].strip('"'), line))
            frame = parent - 1  # parents are written plus one: 1 for an outermost frame
        argument = "" if frames or "stack_frame_id" in op.attrs or "/" in op.scope else op.scope
        # as JAX 0.12 names an argument's gather
        return innermost(frames) or argument and f"argument {argument}"

    def value(
        self, comp: str, ref: Ref, index: int | None, known: Callable[[int, Any], Any]
    ) -> Any:
        """Evaluate an integer that follows from constants and known parameters; else None."""
        name, at = ref
        op = self.computations[comp][name or self.roots[comp]]
        index = index if at is None else at
        operand = lambda i, index=None: self.value(comp, op.operands[i], index, known)
        match op.opcode:
            case "parameter":
                return known(int(op.inside), index)
            case "constant":
                return int(op.inside) if re.fullmatch(r"-?\d+", op.inside) else None
            case "tuple" if index is not None:
                return operand(index)
            case "get-tuple-element" | "copy" | "convert" | "bitcast" | "reshape" | "opt-barrier":
                return operand(0, next(iter(integers(op.attrs, ", index=")), index))
            case "fusion" | "call":
                return self.value(op.called("calls", "to_apply")[0], ROOT, index, operand)
            case "compare" | "add" | "subtract" | "multiply":
                function = getattr(
                    operator, op.attrs.partition("direction=")[2][:2].lower() or op.opcode[:3]
                )
                return (
                    None
                    if (x := operand(0)) is None or (y := operand(1)) is None
                    else function(x, y)
                )

    def trips(self, comp: str, loop: Instruction) -> int | None:
        """Return a loop's trip count, noted by the compiler or counted by stepping its counter; None if
        unknown."""
        if noted := integers(loop.attrs, r'"known_trip_count":\{"n":"'):
            return noted[0]
        condition, body = loop.called("condition", "body")
        # one value alone is carried without a tuple
        indices = range(len(shapes(loop.type))) if loop.type.startswith("(") else [None]
        carried = {i: self.value(comp, loop.operands[0], i, lambda *_: None) for i in indices}
        for trips in range(MAX_TRIPS):
            if not (go_on := self.value(condition, ROOT, None, lambda _, i: carried[i])):
                return None if go_on is None else trips
            carried.update({i: self.value(body, ROOT, i, lambda _, i: carried[i]) for i in indices})
        return None


_LIKE = r"all-|ragged-|reduce-scatter|collective-|send|recv"
# Name of operations, and attributes, of what devices do together.
_PARTNERS = r"\b(?:replica_groups|\w+_pairs|channel_id)="
parsed = functools.lru_cache(maxsize=2)(Module)
_PARALLEL = "modes auto explicit collectives collective_matmul wire _jax"
_MOVERS = (
    *(f"/llmpar/parallel/{name}.py" for name in _PARALLEL.split()),
    "/llmpar/inspect/look.py",
    "/llmpar/model/lora.py",  # it gives weights their adapters
)
_LIBRARIES = "jax|jaxlib|flax|optax|equinox|haiku|einops|chex|jaxtyping|beartype"


def innermost(frames: Iterable[tuple[str, int]]) -> str:
    """Name the innermost frame outside libraries, and, if there is one, outside this package's modes and
    moves."""
    ours = [
        (f, n) for f, n in frames if not re.search(rf"/(?:site|dist)-packages/(?:{_LIBRARIES})/", f)
    ]
    outside = [(f, n) for f, n in ours if not f.endswith(_MOVERS)]
    return next((f"{_known_as(f)}:{n}" for f, n in outside + ours), "")


def _known_as(file: str) -> str:
    """Name a file with its folder, and a notebook's cell as the notebook does, ``In[3]``."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cell = shell and shell.compile.format_code_name(file)
    return cell[1] if cell else "/".join(Path(file).parts[-2:])


def group_axes(attrs: str, mesh: Any) -> tuple[tuple[str, ...], int]:
    """Name the mesh axes along which devices of a group (or of a pair) differ, and a group's size."""
    sizes = [mesh.shape[a] for a in mesh.axis_names]
    places = [*itertools.product(*map(range, sizes))]
    pairs = "source_target_pairs=" in attrs
    groups = _groups(attrs) or ([] if pairs else [[*range(len(places))]])
    named = sorted(i for group in groups for i in group)
    if not {*named} <= {*range(len(places))} if pairs else named != [*range(len(places))]:
        raise ValueError(
            f"groups {groups} are not of the {len(places)} devices of mesh {dict(mesh.shape)}"
        )
    differ = lambda k: any(len({places[i][k] for i in group}) > 1 for group in groups)
    axes = tuple(a for k, a in enumerate(mesh.axis_names) if differ(k))
    # of a group that fills these axes; no group leaves them
    size = math.prod(mesh.shape[a] for a in axes)
    whole = pairs or all(len(g) == size for g in groups)
    return (axes, size) if whole else (("other",), max(map(len, groups)))


def operand_arrow(module: Module, comp: str, name: str, axes: tuple[str, ...], mesh: Any) -> str:
    """Write a collective's operand and result as JAX writes types, ``f32[64@X,128] -> f32[64,128]``: whole
    along ``axes``, and one device's along the others. A permute is described in words. Return '' where the
    operation does not show it."""
    ops = module.computations[comp]
    sizes = {a: mesh.shape[a] for a in mesh.axis_names}
    op, kind = ops[name], ops[name].opcode.removesuffix("-start")
    groups = _groups(op.attrs)
    place = functools.partial(coordinates, sizes, sizes)
    if axes == ("other",):
        return _among(groups, place, sizes)
    does = {
        o.opcode for f in op.called("to_apply") for o in module.computations.get(f, {}).values()
    }
    n = math.prod(sizes.get(a, 0) for a in axes)  # 0: a part of an axis
    if not n or not does <= {"parameter", "copy", "convert", "add"}:
        return ""
    if kind == "collective-broadcast":
        return f"broadcast along {','.join(axes)}"
    if kind in ("collective-permute", "send"):
        return _permuted(groups, place, axes, n)
    # the outermost axis is the last to change
    first = [place(i) for i in groups[0]] if groups else []
    changes_at = lambda a: next((i for i, at in enumerate(first) if at[a] != first[0][a]), 0)
    over = sorted(axes, key=changes_at, reverse=True)
    dim = integers(op.attrs, r"\bdimensions=\{")
    before, after = (
        (module.shape_of(comp, op, 0), op.results[0][1]) if len(op.results) == 1 else ((), ())
    )
    if kind == "all-to-all" and dim and before:
        before, after = _exchanged(module, comp, name, dim[0], before, after)
    sides = [*zip(before, after, strict=False)]
    gathered = [i for i, (a, b) in enumerate(sides) if b == a * n]
    cut = [i for i, (a, b) in enumerate(sides) if a == b * n]
    right = {"all-gather": (dim, []), "reduce-scatter": ([], dim), "all-reduce": ([], [])}
    right["all-to-all"] = gathered[:1] or [-1], cut[:1] or [-1]
    fits = sum(a == b for a, b in sides) + len(gathered + cut) == len(before) == len(after)
    if (gathered, cut) != right.get(kind) or not fits or len(op.results) != 1:
        return ""
    whole = [size * n if i in gathered else size for i, size in enumerate(before)]
    unfinished = axes if kind in ("all-reduce", "reduce-scatter") else ()
    dtype = op.results[0][0]
    before_it = typed(dtype, whole, dict.fromkeys(gathered, over), unfinished)
    return f"{before_it} -> {typed(dtype, whole, dict.fromkeys(cut, over))}"


def _exchanged(
    module: Module, comp: str, name: str, dim: int, before: tuple, after: tuple
) -> tuple[tuple, tuple]:
    """Return the shapes around an all-to-all: XLA exchanges blocks of one dim, and reshapes and transposes
    around it put them into place."""
    ops = module.computations[comp]
    given = ops[ops[name].operands[0][0]]
    halves = module.shape_of(comp, given, 0) if given.opcode == "reshape" else ()
    merged = (*before[:dim], math.prod(before[dim : dim + 2]), *before[dim + 2 :])
    before = halves if halves == merged else before
    for _ in range(3):
        users = module.users[comp, name]
        if len(users) != 1 or ops[users[0]].opcode not in ("reshape", "transpose"):
            break
        name = users[0]
        after = shapes(ops[name].type)[0][1]
        if ops[name].opcode == "reshape" and len(after) == len(before):
            break
    return before, after


def short_dtype(name: str) -> str:
    """Return a dtype's name as JAX's types have it: float32 is f32, uint8 is u8."""
    return re.sub("loat|(?<=u)int|(?<=i)nt", "", name)


def typed(
    dtype: str, shape: Iterable[int], cuts: Mapping[int, Sequence[str]], sums: Sequence[str] = ()
) -> str:
    """Write a type as JAX does, ``f32[64@X,128]{U:Y}``: of each dim the size and its axes, and those of an
    unfinished sum."""
    grouped = lambda axes: axes[0] if len(axes) == 1 else f"({','.join(axes)})"
    dims = [f"{n}@{grouped(cuts[i])}" if cuts.get(i) else str(n) for i, n in enumerate(shape)]
    return f"{dtype}[{','.join(dims)}]" + (f"{{U:{','.join(sums)}}}" if sums else "")


def _permuted(
    groups: list[list[int]], place: Callable[[int], dict[str, int]], axes: tuple[str, ...], n: int
) -> str:
    """Describe a permute along axes of n devices: a hop, a shift by several, or an exchange."""
    apart = {(place(to)[axes[0]] - place(at)[axes[0]]) % n for at, to in groups}
    shift = "hop" if apart in ({1}, {n - 1}) else f"shift by {max(apart)}"
    return f"{shift if len(apart) == len(axes) == 1 else 'exchange'} along {','.join(axes)}"


def _among(
    groups: list[list[int]], place: Callable[[int], dict[str, int]], sizes: dict[str, int]
) -> str:
    """Write which part of the axes each group fills, ``among 2 of X's 4``; '' where groups differ in that."""
    fill = [{a: len({place(i)[a] for i in group}) for a in sizes} for group in groups]
    if any(one != fill[0] or math.prod(one.values()) != len(groups[0]) for one in fill):
        return ""
    words = {
        a: a if n == sizes[a] else f"{n} of {a}'s {sizes[a]}" for a, n in fill[0].items() if n > 1
    }
    return f"among {', '.join(words.values())}"


def _groups(attrs: str) -> list[list[int]]:
    """Read replica groups in XLA's four spellings (replica_group.cc, mesh_and_axis.cc); [] for {}."""
    if m := re.search(r"replica_groups=\[([\d,]+)\]<=(\[\S+?)(?:, |$)", attrs):
        return _in_rows(_iota(m[2]), integers(m[1])[-1])
    if m := re.search(
        r'(?:replica_groups|source_target_pairs)="?\{((?:\{[\d, ]*\},? ?)*)\}', attrs
    ):
        return [integers(g) for g in re.findall(r"\{(.*?)\}", m[1])]
    # mesh['a'=2,'b'=8], device_ids=([4,4]T(1,0)) {'a','b':(2)4}: (2)4 is the middle of b as [2, 4, rest].
    if not (
        m := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*?)\}", attrs)
    ):
        return []
    names, texts = zip(*re.findall(r"([^,=\s]+)=(\d+)", m[1]), strict=True)
    sizes = [*map(int, texts)]
    digits = list[tuple[int, int]]()  # of a device's position, along the chosen axes: stride, size
    for name, start, n in re.findall(r"([^,:\s]+)(?::\((\d+)\)(\d+))?", m[3]):
        start, n = int(start or 1), int(n or sizes[names.index(name)])
        digits.append((math.prod(sizes[names.index(name) :]) // (start * n), n))
    ids = _iota(m[2]) if m[2] else [*range(math.prod(sizes))]
    inside = lambda i: [i // stride % n for stride, n in digits]
    first = lambda i: i - sum(i // stride % n * stride for stride, n in digits)
    order = sorted(range(len(ids)), key=lambda i: (first(i), inside(i)))
    return _in_rows([ids[i] for i in order], math.prod(n for _, n in digits))


def _in_rows(numbers: list[int], n: int) -> list[list[int]]:
    return [numbers[i : i + n] for i in range(0, len(numbers), n)]


@functools.lru_cache(maxsize=1 << 8)
def _iota(text: str) -> list[int]:
    """Read [2,4]T(1,0) as the numbers 0 to 7 in two rows, transposed, row by row; a plain list as itself."""
    dims, _, order = text.partition("T")
    numbers = integers(dims)
    if text[0] != "[":
        return numbers
    order_of = integers(order) or [*range(len(numbers))]
    strides = [math.prod(numbers[i + 1 :]) for i in order_of]
    places = itertools.product(*(range(numbers[i]) for i in order_of))
    return [sum(map(operator.mul, at, strides)) for at in places]
