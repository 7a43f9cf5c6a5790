"""A plan in the words of other frameworks, and their launch lines and configurations read back: one table,
`frameworks.toml`, says what they call which fact of a plan; here it is read in both directions."""

import contextlib
import json
import re
import shlex
import tomllib
from typing import Any

from llmpar.plan import checks
from llmpar.plan.mesh_shape import MeshShape
from llmpar.plan.plan import Plan, Resolved
from llmpar.planner import planner
from llmpar.predict.hardware import package_table

TABLE = package_table("planner/frameworks.toml")
FRAMEWORKS: dict[str, dict[str, Any]] = {x: row for x, row in TABLE.items() if "keys" in row}

EXPORTS = [name for name, row in FRAMEWORKS.items() if "serves" not in row["implies"]]


def facts(q: planner.Question, plan: Plan) -> dict[str, Any]:
    """Return what frameworks have words for: the fields that matter on this mesh, and numbers of it."""
    sizes, m = plan.mesh.user_sizes, plan.microbatches
    if plan.zero == 0:  # fsdp is one more axis of replicas
        sizes |= {"dp": sizes["dp"] * sizes["fsdp"], "fsdp": 1}
    shard, pp = sizes["fsdp"] * sizes["ep"], sizes["pp"]
    local, groups = q.batch_size // (sizes["dp"] * shard), sizes["dp"] if shard > 1 else 1
    return (
        planner.fields_of(plan)
        | sizes
        | {
            "remat": plan.remat,
            "dtype": plan.dtype,
            "zero": plan.zero if shard > 1 else 0,
            "schedule": plan.schedule if pp > 1 else None,
            "context_parallel": plan.context_parallel if sizes["sp"] > 1 else None,
            "recomputed": 1 if plan.remat == "block" else None,
            "shard": shard,
            "instances": groups,
            "microbatches": m,
            "pipe_microbatches": m if pp > 1 else 1,
            "accumulated": 1 if pp > 1 else m,
            "device_batch": q.batch_size / q.num_devices / (1 if pp > 1 else m),
            "local": local if pp > 1 else local // m,
            "pipe_micro": local // m if pp > 1 else None,
            "micro": local // m,
            "each": q.num_devices,
            "batch_size": q.batch_size,
            "seq_len": q.seq_len,
        }
    )


def export(q: planner.Question, plan: Plan, name: str) -> str:
    """Write a plan in a framework's own keys; what it has no word for is a comment."""
    row, known, lines = FRAMEWORKS[name], facts(q, plan), dict[str, Any]()
    lost = {
        name
        for name in {*planner.fields_of(plan), "remat", "tp", "pp", "sp", "ep"} - {"microbatches"}
        if str(known[name]) != str(row["implies"].get(name, 1))
    }
    lost |= {"dp"} if known["instances"] > 1 else set()  # copies of the shards
    for key, fact, *words in row["keys"]:
        value = known.get(fact)
        word = words[0].get(str(value).lower()) if words else value
        lost -= {"dp" if fact == "instances" else fact} if word is not None else set()
        word = "true" if word is True and row["form"] == "words" else word
        if word not in ("", None, False) and (
            value != 1 or words or value is True or fact in ("micro", "device_batch")
        ):
            lines[key] = word
    notes = [f"# not expressed: {x}={known[x]}" for x in sorted(lost) if known[x]]
    nested = {x: word for x, word in lines.items() if "." not in x} | {
        section: {x.partition(".")[2]: y for x, y in lines.items() if x.startswith(f"{section}.")}
        for section in (x.partition(".")[0] for x in lines if "." in x)
    }
    text = {
        "words": " \\\n".join(f"{x}={word}" for x, word in lines.items()),
        "flags": " \\\n".join(f"--{x}" + f" {y}" * (y is not True) for x, y in lines.items()),
        "json": json.dumps(nested, indent=2),
    }
    return "\n".join([f"# {row['name']}: {plan.mesh}", *notes, text[row["form"]]])


def entries(text: str) -> dict[str, Any]:
    """Return the keys and values of JSON, of TOML, of a launch line or of YAML's plain lines."""
    for parse in (lambda t: json.loads(t[t.index("{") : t.rindex("}") + 1]), tomllib.loads):
        with contextlib.suppress(ValueError):
            return _flat(parse(text))
    text = re.sub(r"(?m)^\s*[\w.-]+:\s*$", "", text.replace("\\\n", " "))  # a section of YAML
    text = re.sub(r"(?<!\S)-*([A-Za-z][\w.-]*)(=|:\s+)", r"--\1 ", text)
    words = [*shlex.split(text, comments=True), "--"]
    key = lambda word: re.match(r"--?([a-zA-Z]|$)", word)
    return _flat(
        {a: True if key(b) else b for a, b in zip(words, words[1:], strict=False) if key(a)}
    )


def _flat(value: dict[str, Any], head: str = "") -> dict[str, Any]:
    out = dict[str, Any]()
    for name, part in value.items():
        key = head + name.lstrip("-").replace("-", "_").lower()
        out |= _flat(part, f"{key}.") if isinstance(part, dict) else {key: part}
    return out


def facts_in(text: str) -> tuple[str, dict[str, Any], list[str]]:
    """Return the framework that a text is of, its facts, and what matters in it and is not read."""
    rows = {
        name: _flat({key: rest for key, *rest in [*row["keys"], *row["reads"]]})
        for name, row in FRAMEWORKS.items()
    }
    given = entries(text)
    name = max(rows, key=lambda name: len(rows[name].keys() & given))
    if not rows[name].keys() & given:
        raise ValueError(
            f"no key of {', '.join(FRAMEWORKS)} is in it; give a launch line or a file"
        )
    known, unread = dict(FRAMEWORKS[name]["implies"]), list[str]()
    for key, (fact, *words) in (rows[name] | _flat(TABLE["launchers"])).items():
        value = _number(given.pop(key, None))
        if words and isinstance(value, str | int):
            back = {_number(word): x for x, word in reversed(words[0].items()) if word != ""}
            unread += [] if value in back or value is False else [f"{key}={value}"]
            value = _number(back.get(value))
        kinds = (int, float, str) if words or fact == "model" else (int, float)
        known |= {fact: value} if isinstance(value, kinds) and value not in (1e999, -1e999) else {}
    for rows_in, tokens in (("micro", "micro_tokens"), ("batch_size", "step_tokens")):
        if known.get(tokens, 0) > 0:  # else it is -1, for the default
            known[rows_in] = max(1, known[tokens] // known["seq_len"])
    off = (False, None, "none")
    rest = {x: v for x, v in given.items() if re.search(TABLE["matters"], x)}
    return name, known, unread + [f"{x}={v}" for x, v in rest.items() if _number(v) not in off]


def _number(value: Any) -> Any:
    with contextlib.suppress(ValueError):
        return json.loads(str(value).lower()) if isinstance(value, str) else value
    return value


def fixed_by(name: str, plan: Resolved) -> dict[str, Any]:
    """Return the fields of a plan that a framework has words for, and that decide something on its mesh.
    Those that a text leaves out have the framework's defaults, and are not the planner's to choose."""
    row, own = FRAMEWORKS[name], plan.requested
    words = {fact for _, fact, *_ in (*row["keys"], *row["reads"])} & {*Plan.__dataclass_fields__}
    idle = plan.unused.keys() | checks.unused(plan, words)
    fixed = {x: getattr(own, x) for x in sorted((words | {"remat"}) - idle)}
    return fixed | planner.fields_of(own)


def planned_by(known: dict[str, Any], devices: int | None) -> tuple[int, int, Plan]:
    """Return the devices, the sequences of a step and the plan that facts are of."""
    one = lambda name: max(1, int(known.get(name) or 1))
    ep, cut, dp = one("ep"), one("tp") * one("pp") * one("sp"), max(one("dp"), one("instances"))
    shard = max(known.get("shard", -1), known.get("fsdp", -1) * ep, known.get("mics", -1))
    given = one("nodes") * known["each"] if "each" in known else devices
    data, rest = divmod(count := given or cut * dp * max(shard, ep), cut)
    dp = data // shard if shard > 0 else data // ep if known["zero"] == 0 else dp
    if rest or dp < 1 or data % (ep * dp):
        raise ValueError(f"{count} devices cannot be cut so; --devices says how many there are")
    mesh = MeshShape(one("pp"), dp, data // ep // dp, ep, one("sp"), one("tp"))
    m = one("microbatches") * one("pipe_microbatches") * one("accumulated")
    rows = known.get("micro") or known.get("pipe_micro") or one("pp") == 1 and known.get("local")
    batch = max(known.get("batch_size", 0), 0) or (known.get("local") or one("micro") * m) * data
    batch = round(known.get("device_batch", 0) * count * one("accumulated")) or batch
    m = max(1, batch // data // rows) if rows else m
    own: dict[str, Any] = {"schedule": "interleaved"} if "virtual_stages" in known else {}
    own |= {x: known[x] for x in Plan.__dataclass_fields__ if x in known} | {"microbatches": m}
    own["zero"] = own["zero"] if mesh.fsdp * ep > 1 else 3  # of one rank it says nothing
    idle = {x for x, n in (("context_parallel", mesh.sp), ("tp_sequence", mesh.tp)) if n == 1}
    return count, batch, Plan(mesh, **{x: value for x, value in own.items() if x not in idle})
