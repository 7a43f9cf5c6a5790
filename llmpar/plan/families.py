"""Models that are planned: the layers that a ``config.json`` describes, by the tables of `families.toml`.

A family names its parts; a part is rows, and a row is what a weight is everywhere here: a region, dims, and
by the letters of the dims a shape. So layouts, traffic, memory and FLOPs follow.
"""

import ast
import fnmatch
import functools
import itertools
import json
import math
import operator
import pathlib
import re
from collections import ChainMap, Counter
from typing import Any

from llmpar.files import read_toml
from llmpar.plan import running
from llmpar.plan.places import repeated

TABLES = read_toml(pathlib.Path(__file__).with_suffix(".toml"), "table of families")
PARTS, FACTS, NAMES, NOTES = (TABLES[x] for x in ("parts", "facts", "names", "notes"))
FAMILIES = TABLES["families"] | {name: {"like": known} for name, known in TABLES["aliases"].items()}
RUNNING = tuple(name for name, own in FAMILIES.items() if own.get("runs"))
"""The families that run; the others are planned alone."""
IGNORED, CHANGING = (
    re.compile("|".join(map(fnmatch.translate, TABLES[name]))) for name in ("ignored", "changing")
)
_NESTED = "sizes unsaid facts mixers ffns names model variant routing needs tensors groups otherwise".split()
MOST_LAYERS, MOST = 4096, 1 << 40
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def is_planned(model_type: Any) -> bool:
    """Whether a family's layers are described."""
    return isinstance(model_type, str) and model_type in FAMILIES


def text_part(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the language model: itself, or its part of one that has several media."""
    name = next((x for x in TABLES["text_parts"] if isinstance(raw.get(x), dict)), None)
    if name is None:
        return raw
    outer = str(raw.get("model_type"))
    inner = next((x for x, names in TABLES["inner"].items() if outer in names.split()), outer)
    part = {key: raw[key] for key in TABLES["outer"] if key in raw}
    part |= {"text_part_of": outer, "model_type": inner} | raw[name]
    own = raw[name].get("tie_word_embeddings")
    if isinstance(tied := raw.get("tie_word_embeddings", TABLES["ties"].get(outer)), bool):
        part["tie_word_embeddings"] = tied  # the whole model ties, not its part
        part["ties_differ"] = "tie_word_embeddings" in raw and own not in (None, tied)
    kind, nested = str(part.get("model_type")), TABLES["nested"]
    unsaid = nested.get(kind, nested.get(TABLES["aliases"].get(kind), {}))
    return text_part(unsaid | part)


@functools.cache
def family_of(name: str) -> dict[str, Any]:
    """Return a family's entries over those that it is like."""
    own = FAMILIES[name]
    base = family_of(own["like"]) if "like" in own else {}
    merged = base | own
    for table in _NESTED:
        merged[table] = base.get(table, {}) | own.get(table, {})
    if "attention" in own:
        parts = dict.fromkeys(TABLES["attention"], own["attention"])
        merged["mixers"] = base.get("mixers", {}) | parts | own.get("mixers", {})
    return merged


@functools.cache
def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


class _Reader:
    """Values by name: a letter has an expression, another name is a key of the file. None: it lacks the key.

    In an expression ``a | b`` is b where the file lacks a; else what is of None is None. Of a list, a layer
    sees its own entry; by an index, entries count from the start again after the last.
    """

    def __init__(
        self, file: dict[str, Any], letters: dict[str, str], own: dict[str, Any] | None = None
    ):
        self.file, self.letters, self.own = file, letters, own or {}

    def layer(self, index: int, count: int) -> "_Reader":
        """Return this as a layer sees it: a list is its entry, and ``i`` is its index."""
        entries = {k: x for k, x in self.file.items() if isinstance(x, list) and len(x) >= count}
        kept = self.file.get("per_layer_config")
        pairs = kept.items() if isinstance(kept, dict) else ()
        tables = [x for k, x in pairs if k.isdigit() and int(k) == index and isinstance(x, dict)]
        own = dict(ChainMap(*tables, {k: x[index] for k, x in entries.items()}))
        layer = _Reader(self.file, self.letters | {"i": str(index)}, own)
        by_index = [name for name, text in self.letters.items() if re.search(r"\bi\b", text)]
        letters = {name: repr(layer.get(name)) for name in by_index}
        return _Reader(self.file, layer.letters | letters, own | letters)

    def with_letters(self, letters: dict[str, str]) -> "_Reader":
        """Return this with further letters."""
        return _Reader(self.file, self.letters | letters, self.own)

    def get(self, text: str) -> Any:
        """Return the value of an expression."""
        return self._value(_parsed(text))

    def given(self, text: str, what: str) -> Any:
        """Return the value of an expression; refuse, by its keys, one that the file does not give."""
        value = self.get(text)
        if value is None:
            raise ValueError(f"{what} is not given; it needs {' or '.join(self.missing(text))}")
        return value

    def number(self, text: str, what: str, most: int = MOST) -> int:
        """Return a whole number from 0; refuse others by name."""
        value = self.given(text, what)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and 0 <= value <= most and value == int(value):
            return int(value)
        spelt = self.letters.get(text, text)
        raise ValueError(
            f"{what} ({spelt}) is {value!r:.40}; use a whole number from 0 to {most:,}"
        )

    def missing(self, text: str) -> list[str]:
        """List the keys that an expression names and the file does not give."""
        names = [node.id for node in ast.walk(_parsed(text)) if isinstance(node, ast.Name)]
        lists = [
            self.missing(self.letters[name]) if name in self.letters else [name]
            for name in names
            if self.get(name) is None
        ]
        return list(dict.fromkeys(itertools.chain(*lists))) or [text]

    def _value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                if node.id in self.letters:
                    return self.get(self.letters[node.id])
                return self.own.get(node.id, self.file.get(node.id))
            case ast.Attribute():
                owner = self._value(node.value)
                return owner.get(node.attr) if isinstance(owner, dict) else None
            case ast.Subscript():
                entries, index = self._whole(node.value), self._value(node.slice)
                return entries[index % len(entries)] if entries and index is not None else None
            case ast.Call():  # len
                entries = self._whole(node.args[0])
                return None if entries is None else len(entries)
            case ast.IfExp():
                test = self._value(node.test)
                return None if test is None else self._value(node.body if test else node.orelse)
            case ast.BinOp(op=ast.BitOr()):
                left = self._value(node.left)
                return self._value(node.right) if left is None else left
            case ast.BoolOp():
                decides, values = isinstance(node.op, ast.Or), [self._value(x) for x in node.values]
                if any(value is not None and bool(value) == decides for value in values):
                    return decides
                return None if None in values else not decides
            case ast.UnaryOp(op=ast.Not()):
                return not self._value(node.operand)
            case ast.UnaryOp(op=ast.USub()):
                return self._apply(node, ast.Mult(), -1, self._value(node.operand))
            case ast.Compare(ops=[ast.In() | ast.NotIn() as by]):
                return self._apply(
                    node, by, self._value(node.left), self._whole(node.comparators[0])
                )
            case ast.Compare():
                right = self._value(node.comparators[0])
                return self._apply(node, node.ops[0], self._value(node.left), right)
            case ast.BinOp():
                return self._apply(node, node.op, self._value(node.left), self._value(node.right))
        raise AssertionError(f"'{ast.unparse(node)}' is no expression of the tables")

    def _whole(self, node: ast.expr) -> Any:
        """Return a list of the file, not a layer's entry; None for what is neither that nor a text."""
        value = _Reader(self.file, self.letters)._value(node)
        return value if isinstance(value, list | str) else None

    def _apply(self, node: ast.expr, by: Any, left: Any, right: Any) -> Any:
        if left is None or right is None or isinstance(by, ast.FloorDiv | ast.Mod) and not right:
            return None
        if isinstance(by, ast.Eq | ast.NotEq):
            return (left == right) == isinstance(by, ast.Eq)
        if isinstance(by, ast.In | ast.NotIn):
            entries = right.split(",") if isinstance(right, str) else map(str, right)
            return (str(left) in entries) == isinstance(by, ast.In)
        for value in (left, right):
            is_number = isinstance(value, int | float) and abs(value) <= MOST
            if not is_number or isinstance(by, ast.Pow) and left <= 0 and value is left:
                what = f"'{ast.unparse(node)}' cannot use {value!r:.40}"
                raise ValueError(f"{what}; use a number to {MOST:,}")
        return _OPERATORS[type(by)](left, right)


def read_family(
    raw: dict[str, Any], name: str, why: str = "", runs: bool = False
) -> dict[str, Any]:
    """Return the fields of a `ModelConfig` from a ``config.json``: of one that runs, or ``why`` it does not.
    Refuse, by its key, what a row needs and the file does not give."""
    family = family_of(raw["model_type"])
    usual = {"sparse": str(int("experts" in family["ffns"]))}
    usual |= {"mixer": "layer_types | layers_block_type", "ffn": "None"}
    family = usual | family | {"runs": runs}
    unsaid = family["unsaid"] | TABLES["classes"].get(raw["model_type"], {})
    entries = unsaid | _own_keys(raw)  # null is none, and no entry that a file may leave out
    file = {key: value for key, value in entries.items() if value is not None}
    reader = _Reader(file, TABLES["sizes"] | family["sizes"])
    num_layers = reader.number("layers", "the number of layers", MOST_LAYERS)
    _check_layers(reader, family, num_layers)
    model = {
        "name": name,
        "vocab_size": reader.number("v", "the size of the vocabulary"),
        "width": reader.number("d", "the width of the model"),
        "tied": bool(reader.get("tied")),
        "context_length": _optional(reader, "context"),
        "num_layers": 1,
    }
    kinds, order = _kinds(reader, family, num_layers)
    if not any(map(_params, kinds)):
        raise ValueError(f"the file describes {num_layers} layers, and none has a weight")
    counts = Counter(order)
    load = lambda kind: (bool(kinds[kind]["experts"]), counts[kind] * _params(kinds[kind]))
    largest = max(counts, key=load)  # with experts, if any has some
    kinds = [kind | model for kind in kinds]
    ends, notes = _rows(reader, _parts(reader, family.get("ends", ""))), _notes(reader, family)
    further = 0 if reader.get(TABLES["mtp_of_kinds"]) else _optional(reader, TABLES["mtp"]) or 0
    described = kinds[largest]["described"] | {"ends": ends, "notes": notes, "further": further}
    if family["runs"]:
        running.check_file(raw, family, _unread(reader, runs=True))
        described["ends"] = running.started(ends, kinds[largest], num_layers)
        described["file"] = json.dumps(raw)
    main = kinds[largest] | {"num_layers": num_layers, "described": described, "why_planned": why}
    if len(kinds) == 1:
        return main
    lead, period = repeated(tuple(order))
    return main | {"kinds": kinds, "lead": lead, "period": period}


def _own_keys(file: dict[str, Any]) -> dict[str, Any]:
    """Return a file's entries by the names that count for its model type, without those that do not."""
    result = dict(file)
    for key, names in TABLES["keys"].items():
        for own, types in names.items():
            if key in file and file["model_type"] in types.split():
                del result[key]
                result |= {own: file[key]} if own != "none" else {}
    return result


def _check_layers(reader: _Reader, family: dict[str, Any], num_layers: int) -> None:
    """Refuse a file whose list of layers has another length than it has layers, those for further tokens
    (MTP) aside. Entries by an index are a pattern that repeats."""
    names = re.findall(r"\b\w+\b(?!\[)", f"{family['mixer']} {family['ffn']}")
    names += re.findall(r"len\((\w+)\)", reader.letters["layers"])
    more = _optional(reader, TABLES["mtp"]) or 0
    for name in dict.fromkeys(names):
        entries = reader.file.get(name)
        count = len(entries) if isinstance(entries, list | str) else num_layers
        if count not in (num_layers, num_layers + more):
            raise ValueError(
                f"the model has {num_layers} layers, and {name} names {count}; make them agree"
            )


def _kinds(
    reader: _Reader, family: dict[str, Any], num_layers: int
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the kinds of layers, in the order of their first, and the index of each layer's kind."""
    kinds, order, known = [], [], dict[str, int]()
    for i in range(num_layers):
        layer = reader.layer(i, num_layers)
        pair = _pair(layer, family)
        if (key := repr((pair, layer.own))) not in known:
            kind = _kind(layer, family, *pair)
            if family["runs"]:
                kind |= running.fields(layer, family, pair[0], kind)
                rows = running.started(kind["described"]["rows"], kind, num_layers)
                kind["described"]["rows"] = rows
            kinds += [kind] * (kind not in kinds)
            known[key] = kinds.index(kind)
        order.append(known[key])
    return kinds, order


def _params(kind: dict[str, Any]) -> int:
    return sum(math.prod(row["shape"]) for _, row in kind["described"]["rows"])


def _pair(layer: _Reader, family: dict[str, Any]) -> tuple[str, str]:
    """Return the names of a layer's mixer and feed-forward: those that the file gives, or a rule's."""
    mixers = family["mixer"], family["rule"]
    ffns = family["ffn"], f"'experts' if {family['sparse']} else 'dense'"
    pair = []
    for (given, rule), known in ((mixers, family["mixers"]), (ffns, family["ffns"])):
        name = str(layer.given(f"({given}) | ({rule})", "the kind of a layer"))
        name = name if name in known else family["names"].get(name, NAMES.get(name, name))
        if name not in known:
            raise ValueError(f"a layer '{name:.40}' is not described; {', '.join(known)} are")
        pair.append(name)
    return pair[0], pair[1]


def _optional(reader: _Reader, text: str) -> int | None:
    return (reader.number(text, text) or None) if text and reader.get(text) is not None else None


def _kind(layer: _Reader, family: dict[str, Any], mixer: str, ffn: str) -> dict[str, Any]:
    """Return the fields of a layer with this mixer and this feed-forward."""
    parts = [_parts(layer, text) for text in (family["mixers"][mixer], family["ffns"][ffn])]
    names = *parts[0], mixer, *parts[1], ffn  # what a later one says counts
    tables = [table.get(name, {}) for name in names for table in (FACTS, family["facts"])][::-1]
    facts = {"mixer": "attention" if parts[0] else "none"} | dict(ChainMap(*tables))
    letters = dict(ChainMap(*(table.get("sizes", {}) for table in tables)))
    layer = layer.with_letters(letters)
    experts = None
    if ffn == "experts":
        paths = [path for part in parts[1] for path in PARTS[part]]
        shared = layer.get("u") and any(x.startswith("experts.shared.") for x in paths)
        e, k = layer.number("e", "the number of experts"), layer.number("top", "experts per token")
        experts = {"num_experts": e, "top_k": k, "num_shared": int(bool(shared))}
        groups = layer.number("n_group | num_expert_group | 1", "the number of groups of experts")
        chosen = layer.number("topk_group | 1", "the groups that are open to a token")
        if groups > 1 or family["runs"] and chosen != 1:
            experts |= {"num_groups": groups, "top_groups": chosen}
    return {
        "num_heads": layer.number("n", "the number of heads"),
        "num_kv_heads": layer.number("k", "the number of KV heads"),
        "head_width": layer.number("h", "the width of a head"),
        "ffn_width": layer.number("m", "the width of the feed-forward") if parts[1] else 0,
        "window": _optional(layer, facts.get("window", "")),
        "experts": experts,
        "runs": family["runs"],
        "mixer": facts["mixer"],
        "state_size": _optional(layer, facts.get("state", "")) or 0,
        "described": {
            "rows": _rows(layer, [*_parts(layer, family["layer"]), *parts[0], *parts[1]]),
            "value_width": _optional(layer, facts.get("value", "")),
            "cache_width": _optional(layer, facts.get("cache", "")),
        },
    }


def _parts(reader: _Reader, text: str) -> list[str]:
    """Return the parts that are there: ``bias?attention_bias`` is one of files where this key is true."""
    words = [word.partition("?") for word in text.split()]
    return [name for name, _, key in words if not key or reader.get(key.replace("!", "not "))]


def _rows(reader: _Reader, parts: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of parts, with the shapes that their dims have. A row of one dim, a scale, a bias or a
    short convolution multiplies no matrix."""
    rows = {}
    for part in parts:
        for path, dims in PARTS[part].items():
            region, *pairs = dims.split()
            letters = [pair.partition("=")[0] for pair in pairs]
            shape = [
                reader.number(pair.partition("=")[2] or pair, f"{pair} of {path}") for pair in pairs
            ]
            vector = len(letters) == 1 or path.endswith(("scale", "bias", "_conv"))
            if all(shape):
                rows[path] = {
                    "dims": " ".join((region, *letters)),
                    "shape": shape,
                    "is_vector": vector,
                }
    return list(rows.items())


def rows_of(
    parts: str, fields: dict[str, Any], sizes: dict[str, str]
) -> list[tuple[str, dict[str, Any]]]:
    """Return the rows of parts, by ``sizes`` as expressions of fields."""
    reader = _Reader(fields, sizes)
    return _rows(reader, _parts(reader, parts))


@functools.cache
def _known(model_type: str) -> frozenset[str]:
    """Return the keys that a family's expressions may read."""
    family = family_of(model_type)
    tables = PARTS, FACTS, TABLES["sizes"] | family["sizes"]
    known = set(re.findall(r"\w+", f"{family} {list(family)} {TABLES['always']}"))
    for _ in range(4):  # families name parts, parts letters, and letters others
        texts = [table[name] for name in known for table in tables if name in table]
        known |= set(re.findall(r"\w+", str(texts)))
    return frozenset(known)


def _notes(reader: _Reader, family: dict[str, Any]) -> list[str]:
    """Return what a reader of the plan should know: what is not counted, and keys that are not read."""
    values = {sentence: reader.get(text) for text, sentence in NOTES.items()}
    notes = [sentence.format(value) for sentence, value in values.items() if value]
    notes += [family["note"]] if "note" in family else []
    if unread := _unread(reader):
        notes.append(
            f"keys of the file that are not read and might change sizes: {', '.join(unread)}"
        )
    return notes


def _unread(reader: _Reader, runs: bool = False) -> list[str]:
    """Return the keys of a file that nothing reads and that might change what the model is; of one that runs,
    also those that change no size and answers."""
    known = _known(reader.file["model_type"]) | set(re.findall(r"\w+", " ".join(NOTES)))
    rest = [key for key, value in reader.file.items() if value and key not in known]
    changing = [key for key in rest if runs and CHANGING.fullmatch(key) and reader.file[key] != 1]
    return sorted(key for key in rest if key in changing or not IGNORED.fullmatch(key))
