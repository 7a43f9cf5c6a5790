"""A plan in the words of other frameworks, and their launch lines and configurations read back: one table,
`frameworks.toml`, says what they call which fact of a plan; here it is read in both directions."""

import contextlib
import itertools
import json
import math
import pathlib
import re
import tomllib
from typing import Any

from llmpar.files import read_text
from llmpar.plan import checks
from llmpar.plan.mesh_shape import AXES, MeshShape
from llmpar.plan.model_config import ADAPTABLE
from llmpar.plan.plan import Plan, Resolved
from llmpar.plan.presets import ADAPTER_DIMS, DIMS, PRESETS
from llmpar.planner import planner, shell_text
from llmpar.predict.hardware import package_table

TABLE = package_table("planner/frameworks.toml")
FRAMEWORKS: dict[str, dict[str, Any]] = {x: row for x, row in TABLE.items() if "keys" in row}
EXPORTS = [
    name for name, row in FRAMEWORKS.items() if row["keys"] and "serves" not in row["implies"]
]


def facts(q: planner.Question, plan: Plan) -> dict[str, Any]:
    """Return what frameworks have words for: the fields that matter on this mesh, and numbers of it."""
    sizes, m = plan.mesh.user_sizes, plan.microbatches
    if plan.zero == 0:  # fsdp is one more axis of replicas
        sizes |= {"dp": sizes["dp"] * sizes["fsdp"], "fsdp": 1}
    shard, pp = sizes["fsdp"] * sizes["ep"], sizes["pp"]
    local = q.batch_size // (sizes["dp"] * shard)
    zero = plan.zero if shard * sizes["sp"] > 1 else 0
    repeats = plan.virtual_stages or 1
    layers = q.config.num_layers - q.config.num_further
    lora = q.config.lora
    even = pp > 1 and layers % (pp * repeats) == 0 and m % pp == 0
    return (
        planner.fields_of(plan)
        | sizes
        | {
            "remat": plan.remat,
            "dtype": plan.dtype,
            "zero": zero,
            "fsdp_checkpoint": zero > 1,
            "sharded": zero == 3,
            "reshard_after_forward": plan.reshard_after_forward if zero == 3 else None,
            "tp_sequence": plan.tp_sequence and sizes["tp"] > 1,
            "tp_comm_overlap": plan.tp_comm_overlap and plan.tp_sequence and sizes["tp"] > 1,
            "schedule": plan.schedule if pp > 1 else None,
            "context_parallel": plan.context_parallel if sizes["sp"] > 1 else None,
            "recomputed": 1 if plan.remat == "block" else None,
            "shard": shard,
            "instances": sizes["dp"] if zero else 1,
            "microbatches": m,
            "even_pp": pp if even else None,  # for frameworks that refuse another
            "repeats": repeats if even else None,
            "stage_layers": layers // (pp * repeats) if even else None,
            "pipe_microbatches": m if even else None,
            "accumulated": 1 if pp > 1 else m,
            "device_batch": q.batch_size / q.num_devices / (1 if pp > 1 else m),
            "local": local if pp > 1 else local // m,
            "pipe_micro": local // m if pp > 1 else None,
            "micro": local // m,
            "each": q.num_devices,
            "ranks": q.num_devices,
            "batch_size": q.batch_size,
            "seq_len": q.seq_len,
            "lora": lora is not None,
            "lora_rank": lora and lora.rank,
            "lora_alpha": lora and f"{lora.alpha:g}",
            "lora_targets": lora and ",".join(x for x in ADAPTABLE if x in lora.targets),
        }
    )


def export(q: planner.Question, plan: Plan, name: str) -> str:
    """Write a plan in a framework's own keys. What does not come back when they are read is a comment."""
    row, known, lines = FRAMEWORKS[name], facts(q, plan), dict[str, Any]()
    for key, fact, *words in row["keys"]:
        value = known.get(fact)
        word = words[0].get(str(value).lower()) if words else value
        word = word[0] if isinstance(word, list) else word
        word = "true" if word is True and row["form"] == "words" else word
        needed = value != 1 or words or value is True or fact in (*row["implies"], *TABLE["always"])
        lines |= {key: word} if needed and word not in ("", None, False) else {}
    lines = {x: y for x, y in lines.items() if not _lacks(row, _key(x), {*map(_key, lines)})}
    nested = {x: word for x, word in lines.items() if "." not in x} | {
        section: {x.partition(".")[2]: y for x, y in lines.items() if x.startswith(f"{section}.")}
        for section in (x.partition(".")[0] for x in lines if "." in x)
    }
    text = {
        "words": " \\\n".join(f"{x}={word}" for x, word in lines.items()),
        "flags": " \\\n".join(f"--{x}" + f" {y}" * (y is not True) for x, y in lines.items()),
        "json": json.dumps(nested, indent=2),
    }[row["form"]]
    notes = [f"# not expressed: {x}={y}" for x, y in _lost(q, plan, name, text).items()]
    return "\n".join([f"# {row['name']}: {plan.mesh}", *notes, text])


def _lost(q: planner.Question, plan: Plan, name: str, text: str) -> dict[str, Any]:
    """Return what a framework's text does not give back: fields of a plan, and sizes."""
    sizes = dict.fromkeys(("batch_size", "lora_rank", "lora_targets"))
    back = Plan()
    # an axis without a key leaves fewer devices to the others
    with contextlib.suppress(ValueError):
        known = {x: y for x, y in facts_in(text, name)[1].items() if x not in ("each", "ranks")}
        cut = math.prod(getattr(plan.mesh, x) for x in ("pp", "sp", "tp") if x not in known)
        sizes = {x: known.get(x) for x in sizes}
        _, sizes["batch_size"], back = planned_by(known, q.num_devices // cut)
    own = q.resolved(plan, None)
    fields = {*Plan.__dataclass_fields__} - {"mesh"}
    written, read = ({x: getattr(y, x) for x in fields} | facts(q, y) for y in (plan, back))
    compared = {*fields, *AXES, *sizes} - {*own.unused, *checks.unused(own, fields)}
    return {
        x: written[x] for x in sorted(compared | {"zero"}) if written[x] != sizes.get(x, read[x])
    }


def entries(text: str) -> list[dict[str, Any]]:
    """Return the keys and values of JSON, of TOML, or of YAML's plain lines, or those of each command of a
    shell script, a text within YAML (`args: |`) being one, too."""
    bare = re.sub(TABLE["comments"], "", text).strip()
    listed = re.sub(TABLE["item"], " ", bare) if re.search(TABLE["listed"], bare) else bare
    if bare.startswith("{"):
        return [_flat(json.loads(bare))]
    if listed == bare and re.match(TABLE["yaml_line"], bare.lstrip("-\n")):
        entered = [_flat(_yaml(re.sub(TABLE["comments"], "", text)))]
        for lines, _, line in re.findall(TABLE["block"], text):
            with contextlib.suppress(ValueError):  # other texts are no scripts
                entered += entries(lines or line) if re.search(TABLE["run"], lines or line) else []
        return entered
    if re.search(r"(?m)^\s*\[[\w.]+\]\s*$", bare):
        return [_flat(tomllib.loads(text))]
    return [
        _flat(_flags(words))
        for words in shell_text.script_commands(text if listed == bare else listed)
    ]


def _flat(value: dict[str, Any], head: str = "") -> dict[str, Any]:
    out = dict[str, Any]()
    for name, part in value.items():
        own = re.sub(TABLE["sections"], "", head + _key(name))
        key = re.sub(TABLE["of_model"], "model.", own)
        out |= _flat(part, f"{key}.") if isinstance(part, dict) else {key: part}
    return out


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_").lower()


def _yaml(text: str) -> dict[str, Any]:
    """Return YAML's values by their sections and names, joined by points; a list's items in one text."""
    out, path = dict[str, Any](), dict[int, str]()
    text = re.sub(r"(?m)\n\s*- +(?=[^\n:]+$)|\n(?=[^\[\]{}:]*\])", " ", text)
    text = re.sub(TABLE["inline"], r"\n" + 60 * " " + r"\2: ", text)
    for indent, key, value in re.findall(TABLE["yaml_line"], text):
        path = {x: name for x, name in path.items() if x < len(indent)} | {len(indent): _key(key)}
        word = TABLE["yaml"].get(value.lower(), value.strip("'\",}"))
        out |= {".".join(path.values()): word} if value else {}
    return out


def _flags(words: list[str]) -> dict[str, Any]:
    """Return the keys of a command with the words behind each."""
    out, key = dict[str, list[str]](), ""
    short = TABLE["short"] if "srun" in words else {}
    plain = [x for x in words if not re.fullmatch(TABLE["environment"], x, re.DOTALL)]
    for pattern, flag in TABLE["spelled"].items():
        plain = [re.sub(pattern, flag, x) for x in plain]
    for word in plain:
        head, is_set, value = short.get(word, word.lstrip("+")).partition("=")
        if re.fullmatch(TABLE["flag"] + r"|[A-Za-z][\w.]*" * bool(is_set), head):
            out[head] = [value] if is_set else []
            key = "" if is_set else head
        elif out.get(key) != [] and TABLE["commands"].get(word) in plain:
            key = word
        elif not re.fullmatch(TABLE["launch"], word) and (key or re.search(TABLE["file"], word)):
            out.setdefault(key, []).append(word)
    return {x: " ".join(words) if words else True for x, words in out.items()}


def _opened(given: dict[str, Any], folders: tuple[str, ...]) -> dict[str, Any]:
    """Return the keys and values of a command, and behind them those of configurations that it names, where
    one of the folders has them; "auto" of these is what the command says."""
    named = [x for x in given if re.fullmatch(TABLE["opened"], x)]
    files = [(x, pathlib.Path(y, z)) for x in named for y in folders for z in _tokens(given[x])]
    for key, path in files:
        if re.search(TABLE["file"], path.name) and path.is_file() and given[key] != "[]":
            inner = entries(read_text(path, "configuration"))[0].items()
            # the key stays on, and no word of it is left to name
            given = {x: y for x, y in inner if y != "auto"} | given | {key: "[]"}
    return given


def facts_in(
    text: str, framework: str = "", folders: tuple[str, ...] = ()
) -> tuple[str, dict[str, Any], list[str]]:
    """Return the framework that a text is of, its facts, and what is in it and is not priced; configurations
    that it names are read where one of the folders has them. Raise ValueError for a value that decides mesh,
    batch, model or precision and cannot be read."""
    try:
        commands = [_opened(_opened(x, folders), folders) for x in entries(text)]
    except ValueError as error:
        raise ValueError(f"the launch line or file cannot be read: {error}; correct it") from None
    rows = {
        name: [(_key(key), *rest) for key, *rest in (*row["keys"], *row["reads"])]
        for name, row in FRAMEWORKS.items()
        if framework in ("", name)
    }
    keys = {name: {key for key, *_ in row} - {*TABLE["alone"]} for name, row in rows.items()}
    # a module that is run tells, too
    score = lambda name, x: len(keys[name] & x.keys()) + (name in str(x.get("m")).lower())
    name, given = max(itertools.product(rows, commands), key=lambda x: score(*x))
    if not score(name, given):
        raise ValueError(
            f"no key of {', '.join(FRAMEWORKS)} is in it; give a launch line or a file"
            + "; a file that it names is not in this folder" * bool(re.search(TABLE["names"], text))
        )
    row, left = FRAMEWORKS[name], dict[str, list[str]]()
    on = {key for key, value in given.items() if str(value).lower() not in TABLE["off"]}
    known = row["implies"] | {
        x: y for key in row.get("brings", {}).keys() & on for x, y in row["brings"][key].items()
    }
    for key, fact, *words in [*rows[name], *TABLE["launchers"]]:
        if key in given and not _lacks(row, key, on):
            read = _read(row, key, fact, words, given[key])
            first = list(read.values())[:1]  # another one is another plan
            left[key] = [x for x in left.get(key, _tokens(given[key])) if read.get(x) not in first]
            known |= dict(zip([fact], first, strict=False))
    others = [x for x in commands if x != given and score(name, x)]
    return (
        name,
        _derived(row, known),
        _unread(row, given, on, left) + [f"other commands: {len(others)}"] * bool(others),
    )


def _lacks(row: dict[str, Any], key: str, on: set[str]) -> list[str]:
    """Return the keys of which a key needs one to have an effect, where none is on."""
    needs = (others for x, others in row.get("needs", {}).items() if re.fullmatch(x, key))
    return next((others for others in needs if not on & {*others}), [])


def _number(value: str, units: dict[str, int]) -> Any:
    number, unit = value[:-1], value[-1:]
    if unit in units and re.fullmatch(r"[\d.]+", number):
        return round(float(number) * units[unit])
    with contextlib.suppress(ValueError):
        return json.loads(re.sub(r"^0*(?=\.)", "0", re.sub(r"^0+(?=\d)", "", value.lower())))
    return value


def _tokens(value: Any) -> list[str]:
    return re.findall(
        r"[^\s,\[\]'\"]+",
        re.sub(r"^\d[\d_]*$", lambda number: number[0].replace("_", ""), str(value)),
    )


def _read(
    row: dict[str, Any], key: str, fact: str, words: list[dict[str, Any]], value: Any
) -> dict[str, Any]:
    """Return the tokens of a value that are understood, each with what it is, the one that counts first.
    What decides the plan and cannot be read is refused."""
    tokens, kinds = _tokens(value), TABLE["kinds"] | row.get("kinds", {})
    kind = re.compile(kinds.get(key, kinds.get(fact, kinds["count"])), re.ASCII)
    read = {x: _number(x, row.get("units", {})) for x in tokens[:1] if kind.fullmatch(x)}
    for spelled in words:
        back = {y.lower(): x for x, word in reversed(spelled.items()) for y in _tokens(word)}
        read = {x: _number(back[y], {}) for y in back for x in tokens if y in (x.lower(), "*")}
        if fact in TABLE["lists"]:
            read = dict.fromkeys(read, ",".join(list(read.values())[::-1]))
    free = re.fullmatch(f"{TABLE['free']}|{row.get('free')}", f"{key}={value}")
    if read or free or words and fact not in TABLE["deciding"]:
        return read
    raise ValueError(
        f"{row['name']} is given {key}={value}, which decides the plan and cannot be read; write a number of"
        " 1 or more, or the framework's word, in its place"
    )


def _unread(
    row: dict[str, Any], given: dict[str, Any], on: set[str], left: dict[str, list[str]]
) -> list[str]:
    """Return what is given and not priced, but for keys that change neither memory nor time."""
    out = list[str]()
    for key, value in given.items():
        rest = left.get(key, _tokens(value))
        shown = value if rest in ([], _tokens(value)) else " ".join(rest)
        entry = f"{key}={shown}".lstrip("=")
        lacks = " or ".join(_lacks(row, key, on))
        why = {
            f" (read only with {lacks})": lacks,
            " (a file that was not opened)": re.search(TABLE["file"], entry),
            " (but for its model)": re.fullmatch(TABLE["recipe"], key),
        }
        idle = not rest or re.fullmatch(TABLE["idle"], entry.lower())
        if not idle or re.fullmatch(row.get("near", ""), f"{key}={value}"):
            out.append(entry.removesuffix("=True") + next((x for x in why if why[x]), ""))
    return out


def _derived(row: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """Add what follows from several facts. Raise ValueError for frozen weights that are not planned."""
    if bits := known.get("frozen_bits"):
        raise ValueError(
            f"{row['name']} is given frozen weights of {bits} bits, and here they have the 16 or 32 bits of"
            f" matmuls; leave the {bits} bits out to price LoRA on 16, whose weights take {16 // bits} times"
            " as much memory"
        )
    if not known.get("lora_rank"):
        known = {x: y for x, y in known.items() if not x.startswith("lora")}
    if known.get("num_experts") == 1:  # a dense model
        known = {x: y for x, y in known.items() if x not in ("num_experts", "top_k")}
    if row.get("defaults", {}).keys() & known.keys() and "model" not in known:
        known = row["defaults"] | known
    if known.keys() >= {"virtual_layers", "num_layers"}:
        stages = known["num_layers"] // known.get("pp", 1) // known["virtual_layers"]
        known |= {"virtual_stages": max(1, stages)}
    name = "-".join(str(known[x]) for x in ("model", "flavor") if x in known)
    known |= {"model": _preset_name(name)} if name else {}
    for rows_in, tokens in (("micro", "micro_tokens"), ("batch_size", "step_tokens")):
        if tokens in known:
            known[rows_in] = max(1, known[tokens] // known["seq_len"])
    if "derives" in row and known.keys() >= {"width", "num_heads"}:
        width, heads = known["width"], known["num_heads"]
        sizes = {"num_kv_heads": heads, "head_width": width // heads, "ffn_width": 4 * width}
        sizes |= {"ffn_width": width * 8 // 3 // 64 * 64} if row["derives"] in known else {}
        return sizes | known
    return known


def _preset_name(name: str) -> str:
    """Return the preset that a public name is of, as Meta-Llama-3-8B-Instruct; another name as it is."""
    plain = lambda x: re.sub(
        r"[^a-z0-9]", "", re.sub(TABLE["tuned"], "", x.rpartition("/")[2].lower())
    )
    return ({plain(x): x for x in PRESETS} | TABLE["models"]).get(plain(name), name)


def fixed_by(name: str, plan: Resolved) -> dict[str, Any]:
    """Return the fields of a plan that a framework has words for, and that decide something on its mesh.
    Those that a text leaves out have the framework's defaults, and are not the planner's to choose."""
    row, own = FRAMEWORKS[name], plan.requested
    words = {fact for _, fact, *_ in (*row["keys"], *row["reads"])} & {*Plan.__dataclass_fields__}
    idle = plan.unused.keys() | checks.unused(plan, words)
    return {x: getattr(own, x) for x in sorted((words | {"remat"}) - idle)} | planner.fields_of(own)


def assumptions(
    name: str, known: dict[str, Any], unread: list[str], q: planner.Question, plan: Plan
) -> list[str]:
    """Say what of a text is not priced, and what is priced and not of the text: ``q`` has the fields that it
    fixes (`fixed_by`), ``plan`` is the one that was priced."""
    chosen = [f"{x}={y}" for x, y in planner.fields_of(plan).items() if x not in q.fixed]
    missing = [x for x, facts in TABLE["stated"].items() if not any(map(known.get, facts))]
    tp = plan.mesh.tp if plan.mesh.ep > 1 or "num_experts" in known else 1
    cut = ["a plan in which tp cuts them too"] * (1 < tp != known.get("etp", tp))
    saved = {
        "input": "stage_saves=input, which keeps a stage's input alone, and runs it forward once more",
        "residuals": "stage_saves=residuals, which keeps all, and recomputes nothing",
    }
    stage = [saved[plan.stage_saves]] * (plan.mesh.pp > 1 and known["remat"] != "none")
    sizes = f"{q.model}, {q.seq_len:,} tokens, batch {q.batch_size}, {q.num_devices} devices"
    assumed = [f"{x}={known.get(x, getattr(plan, x))}" for x in ("zero", "remat", "dtype")]
    lines = [
        (unread, "says {}: not priced"),
        (assumed * any("was not opened" in x for x in unread), "is priced without that file: {}"),
        (missing, f"names no {{}} (see --model, --seq-len, --devices): priced are {sizes}"),
        (cut, f"cuts experts into {known.get('etp')} by tensor parallelism: priced is {{}}"),
        (
            stage,
            f"recomputes (remat={known['remat']}) in stages that keep the rest; priced is {{}}",
        ),
        (chosen, "has no key for {}: chosen, and not of the text"),
        ([q.model] * ("serves" in known), TABLE["serves"] + f" --devices {q.num_devices}"),
    ]
    return [f"{name} {line.format(', '.join(parts))}" for parts, line in lines if parts]


def sized(
    known: dict[str, Any], model: str, devices: int | None, seq_len: int
) -> tuple[dict[str, Any], Plan]:
    """Return the model in words, the sizes of a step and the plan that facts are of: those that are given
    where a text names none."""
    dims = [f"{x}={known[x]}".lower() for x in (*DIMS, *ADAPTER_DIMS) if x in known]
    devices, batch_size, plan = planned_by(known, devices)
    sizes = {"devices": devices, "batch_size": batch_size, "seq_len": known.get("seq_len", seq_len)}
    return sizes | {"model": " ".join([known.get("model", model), *dims])}, plan


def planned_by(known: dict[str, Any], devices: int | None) -> tuple[int, int, Plan]:
    """Return the devices, the sequences of a step and the plan that facts are of. Raise ValueError where
    the sizes do not go together: the framework refuses them too."""
    one = lambda name: math.prod(max(1, known.get(x + name) or 1) for x in ("", "dcn_", "more_"))
    # without nodes a text has the devices of one alone
    counted = one("nodes") * known.get("each", 0) if "nodes" in known or not devices else 0
    given = known.get("ranks") or counted or devices
    filled = [x for x in AXES if known.get(x, -1 if x == "fsdp" else 1) == -1 and "slices" in known]
    known = known | {x: (given or 0) // math.prod(map(one, AXES)) for x in filled if x != "fsdp"}
    ep, cut, dp = one("ep"), one("tp") * one("pp") * one("sp"), max(one("dp"), one("instances"))
    shard = max(
        known.get("shard", -1),
        known.get("mics", -1),
        one("fsdp") * ep if known.get("fsdp", -1) > 0 or "slices" in known and not given else -1,
        (given or 0) // cut // max(one("nodes"), one("machines")) if known.get("hybrid") else -1,
    )
    data, rest = divmod(count := given or cut * dp * max(shard, ep), cut)
    copies = data // shard if shard > 0 else data // ep if known["zero"] == 0 else dp
    if (
        rest
        or copies < 1
        or data % (ep * copies)
        or data % max(shard, known.get("more_fsdp", 1), 1)
        or 0 in map(known.get, filled)
        or len(filled) > 1
        or copies != dp
        and (known.get("dcn_dp", -1) > 0 or "dp" in known and "slices" not in known)
    ):
        raise ValueError(
            f"{count} devices cannot be cut so: {cut} for a rank of data, {max(shard, ep)} of these for a"
            f" shard, {dp} copies{' (one size alone may be -1)' if filled else ''}; --devices says how many"
            " there are"
            + "; here ranks of experts are ranks of data, none of tp or cp"
            * (ep > data > 0)
        )
    mesh = MeshShape(one("pp"), copies, data // ep // copies, ep, one("sp"), one("tp"))
    if "least_batch" in known:  # of ms-swift, which counts all ranks
        known = {"microbatches": -(-known["least_batch"] // (one("micro") * count))} | known
    pipes = known.get("pipe_microbatches", mesh.pp if "slices" in known else 1)
    m = one("microbatches") * one("accumulated") * (pipes if mesh.pp > 1 else 1)
    rows = known.get("micro") or known.get("pipe_micro" if mesh.pp > 1 else "local")
    local = one("micro") * m if "micro" in known else known.get("local", m)
    by_device = round(known.get("device_batch", 0) * count * one("accumulated"))
    batch = known.get("batch_size") or by_device or local * data
    if (
        batch % (data * (rows or m))
        or rows
        and "microbatches" in known
        and batch != data * rows * m
    ):
        raise ValueError(
            f"a batch of {batch} sequences does not go with"
            f" {data} ranks of data{f' x {rows} sequences' if rows else ''}"
            f"{f' x {m} microbatches' if m > 1 else ''}; the framework refuses it too: change one of them,"
            " or --devices"
        )
    own = {x: known[x] for x in Plan.__dataclass_fields__ if x in known}
    own |= {
        "microbatches": batch // data // rows if rows else m,
        "zero": known["zero"] if mesh.fsdp * ep * mesh.sp > 1 else 3,  # of one rank it says nothing
    }
    own |= {"schedule": known.get("looped", "interleaved")} if one("virtual_stages") > 1 else {}
    if known["remat"] in ("none", "selective") and "serves" not in known:
        # stages keep what their layers save; ours then recompute nothing (`checks.unused`)
        own |= {"stage_saves": "residuals"}
    idle = {
        "context_parallel": mesh.sp,
        "sequence_order": mesh.sp,
        "tp_sequence": mesh.tp,
        "schedule": mesh.pp,
        "stage_saves": mesh.pp,
        "virtual_stages": min(mesh.pp, one("virtual_stages")),
    }
    return count, batch, Plan(mesh, **{x: y for x, y in own.items() if idle.get(x, 2) > 1})
