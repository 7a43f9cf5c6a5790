"""Reads published runs, and compares the model of time and memory with them.

A file is a list of groups. A group has an ``id``, a ``source``, ``inputs`` (what was run) and ``expected``
(what was measured); a sweep has ``rows`` in place of the latter, and ``columns`` that name what was run and
measured in each. `publications.toml` says what each key is (`INPUTS`,
`_MEASURED`), what a source says of all its runs (`SOURCES`), and how models are called. A group with a key,
an axis, a model or another word that is unknown is left out by name.
"""

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmpar.files import read_json
from llmpar.plan.mesh_shape import MeshShape, parse_mesh
from llmpar.plan.model_config import ADAPTABLE, ExpertConfig, LoraConfig, ModelConfig, from_dict
from llmpar.plan.presets import PRESETS, described_model
from llmpar.predict import hardware
from llmpar.predict.serving import shared_matrices
from llmpar.predict.time import step_time
from llmpar.predict.workload import POLICIES, PUBLICATIONS, SOFTWARE, Run

INPUTS: dict[str, str] = PUBLICATIONS["inputs"]
_MEASURED: dict[str, str] = PUBLICATIONS["measured"]
"""What was measured, and which of our answers it is compared with. The rest of ``expected`` is derived."""
SOURCES = {word: PUBLICATIONS["usual"] | row for word, row in PUBLICATIONS["sources"].items()}
"""What a publication says of all its runs, by a word of its name."""
MATRICES = {name: row.pop("matrices", 3) for name, row in PUBLICATIONS["models"].items()}
_MODELS = {
    **PRESETS,
    **{name: PRESETS[preset] for name, preset in PUBLICATIONS["aliases"].items()},
    **{name: from_dict({"name": name} | row) for name, row in PUBLICATIONS["models"].items()},
    **{name: described_model(name, raw) for name, raw in PUBLICATIONS["planned"].items()},
}
_BITS = {"FP8": 8, "MXFP8": 8, "INT8": 8, "MXFP4": 4, "NVFP4": 4, "BF16": 16, "FP16": 16}
"""Of the operands of matmuls, by how a precision's name begins."""
_FRAGMENTS = 0.03
"""Of a device's memory that is left free: fragments of the allocator."""
WHOLE_BATCH = ("maxtext", "llmpar")
"""Frameworks that take the batch at once where no microbatches are set."""


@dataclass(frozen=True)
class Case:
    """One measured run: what was run, and what was measured (``step_s``, ``memory_gb``, ``fits``)."""

    id: str
    group: str
    run: Run
    measured: dict[str, Any]
    source: str = ""


def read_runs(path: str | Path) -> tuple[list[Case], dict[str, str]]:
    """Return the cases of a file, and the groups that cannot be compared with the model, with the reason."""
    groups = read_json(path, "measured runs", list)
    if not all(isinstance(g, dict) and "id" in g for g in groups):
        raise ValueError(f"'{path}' is no list of groups, each with an id, inputs and expected")
    cases, left = list[Case](), dict[str, str]()
    for group in groups:
        readable, failed = list[Case](), dict[str, str]()
        try:
            for one in _runs(group):
                try:
                    readable.append(_case(one[0], group, *one[1:]))
                except ValueError as why:
                    failed[one[0]] = str(why)
        except ValueError as why:
            failed[""] = str(why)
        except (TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            failed[""] = (
                "an input has a value that it cannot have, or one is missing"
                f" ({type(error).__name__}: {error})"
            )
        cases += readable
        left |= failed if readable else {str(group["id"]): why for why in reversed(failed.values())}
    return cases, left


def _runs(group: dict) -> Iterator[tuple[str, dict, dict]]:
    """Return the runs of a group: a name, what was run, and what was measured."""
    name, inputs, expected = str(group["id"]), group.get("inputs", {}), group.get("expected", {})
    rows = [dict(zip(group["columns"], row, strict=True)) for row in group.get("rows", ())]
    for i, row in enumerate(rows or [expected]):
        results = {key: value for key, value in row.items() if key in _MEASURED}
        if not results:
            raise ValueError("it holds no step time, memory or fit: nothing to compare")
        own = {key: value for key, value in row.items() if rows and key not in results}
        yield f"{name}/{i}" if rows else name, inputs | own, results


def _source(text: str) -> dict[str, Any]:
    rows = (row for word, row in SOURCES.items() if word.lower() in text.lower())
    return next(rows, PUBLICATIONS["usual"])


def _one_of(table: dict[str, Any], word: Any, what: str) -> Any:
    """Return the row of a table whose name begins what is said. Refuses what none does."""
    for name, row in table.items():
        if str(word).upper().startswith(name.upper()):
            return row
    raise ValueError(f"{what} '{word}' is not known; known are {', '.join(table)}")


def _case(name: str, group: dict, inputs: dict, results: dict) -> Case:
    if unknown := sorted(set(inputs) - set(INPUTS)):
        raise ValueError(f"unknown inputs {', '.join(unknown)}; known are {', '.join(INPUTS)}")
    source = _source(group.get("source", ""))
    known = source["inputs"] | {k: v for k, v in inputs.items() if v is not None}
    software = known.get("software", source["software"])
    if software not in SOFTWARE:
        raise ValueError(f"software '{software}' is not known; known are {', '.join(SOFTWARE)}")
    chip = _chip(known)
    config, ffn_products = _model(known, source, group)
    mesh, slices = _mesh(known, chip)
    if slices > 1 and chip.link == "torus":
        chip = replace(chip, node_size=max(1, mesh.size // slices // chip.devices_per_chip))
    rows, microbatches = _batch(known, mesh, software)
    if mesh.fsdp > 1 and software == "megatron-bridge":
        software = "megatron-fsdp"
    vp = known.get("vp", 1)
    schedule = {"1f1b": "1f1b", "gpipe": "gpipe", "interleaved": "1f1b", "none": "1f1b"}
    run = Run(
        config, chip, mesh, known["seq"], rows, microbatches, SOFTWARE[software],
        3 if mesh.fsdp > 1 or (known.get("fsdp") or 1) > 1 else known.get("zero", source["zero"]),
        schedule="interleaved" if vp > 1 else _one_of(schedule, known.get("schedule", "none"), "schedule"),
        virtual_stages=vp,
        tp_sequence=source["tp_sequence"] and mesh.tp > 1,
        tp_overlap=(source["tp_overlap"] or chip.link == "torus") and mesh.tp > 1,
        ep_overlap=source["tp_overlap"] and vp > 1,
        context_parallel=source["context_parallel"],
        ffn_products=ffn_products,
        gpt=source["gpt"],
        bits=_one_of(_BITS, known.get("precision", "BF16"), "precision"),
        expert_tp=False,
        balanced=source["balanced"],
        reshard=mesh.pp == 1,  # FSDP keeps weights where a pipeline uses them again
        ends_as_layers=known.get("ends_as_layers", False) and mesh.pp > 1,
        document=known.get("document"),
        neighbours=known.get("neighbours", False),
    )  # fmt: skip
    run = replace(run, recompute=_recompute(known, source, run))
    if known.get("offload", software == "maxtext" and "mesh" in known) and not fits_memory(run):
        run = replace(run, offload=True)
    return Case(name, group["id"], run, _measured(results, run), group.get("source", ""))


def _chip(known: dict) -> hardware.Chip:
    """Return the chip that is named, as it is in the machine."""
    if "chip" not in known:
        raise ValueError("it names no chip; give one, as 'chip': 'h100'")
    row = hardware.chip(str(known["chip"]))
    if reached := known.get("reached"):  # by the source's own measurements, nothing is fitted
        row = replace(
            row,
            reached=hardware.Rates(**hardware.checked(hardware.Rates, dict(reached), "reached")),
        )
    names = ("hbm", "hbm_rate", "power", "network" if row.link == "switch" else "hbm")
    return hardware.in_machine(row, **{name: known.get(name) for name in names})


def _model(known: dict, source: dict, group: dict) -> tuple[ModelConfig, int]:
    """Return the model's dims, and the matrices of its feed-forward."""
    matrices = known.get("matrices")
    if "model" in known:
        name = str(known["model"]).lower()
        if name not in _MODELS:
            raise ValueError(
                f"model '{known['model']}' is not known; give h, layers, heads, ffn and vocab"
            )
        config = _MODELS[name]
        sizes = {"layers": "num_layers", "kv_heads": "num_kv_heads"}
        changes: dict[str, Any] = {sizes[key]: n for key, n in known.items() if key in sizes}
        if config.experts and "dense_layers" in known:
            changes["lead"] = config.lead[:1] * known["dense_layers"]
        if rank := known.get("lora_rank"):
            named = known.get("lora_targets", " ".join(ADAPTABLE)).split()
            changes["lora"] = LoraConfig(rank, targets=tuple(named))
        return replace(config, **changes), matrices or MATRICES.get(name, 3)
    width = known.get("h")
    if not width or "layers" not in known:
        raise ValueError("it gives no dims of its model: h, layers, heads, ffn, vocab")
    heads = known.get("heads") or source["heads"].get(str(width)) or width // 128
    config = ModelConfig(
        group["id"], known.get("vocab", 51_200), width, known["layers"], heads, known.get("kv_heads", heads),
        width // heads, known.get("ffn", 4 * width), tied=source["gpt"],
    )  # fmt: skip
    if known.get("experts", 0) > 1:
        counts = known["experts"], known.get("top_k", 1)
        config = replace(
            config, experts=ExpertConfig(*counts, num_shared=known.get("shared_experts", 0))
        )
    return config, matrices or source["ffn_products"]


def _mesh(known: dict, chip: hardware.Chip) -> tuple[MeshShape, int]:
    """Return the mesh, and how many slices it spans. ``dp`` of numbers counts the ranks of ``ep`` too."""
    slices = known.get("slices", 1)
    devices = known.get("gpus", known.get("devices", known.get("chips", 0) * chip.devices_per_chip))
    if "mesh" in known:
        text = str(known["mesh"]).replace("cp", "sp")
        shape = parse_mesh(text, devices // slices if "-1" in text else None)
        if devices % shape.size:
            raise ValueError(f"mesh '{known['mesh']}' does not divide its {devices} devices")
        return replace(shape, dp=shape.dp * max(1, devices // shape.size)), slices
    if "sp" in known and "cp" in known:
        raise ValueError("cp and sp are two names of the same axis; give one")
    tp, pp, cp, ep, fsdp = (known.get(axis) or 1 for axis in ("tp", "pp", "cp", "ep", "fsdp"))
    cp = known.get("sp") or cp
    data = known.get("dp") or max(1, devices // (tp * pp * cp))
    given = tp * pp * cp * (known.get("dp") or 1)  # Megatron's ep may span tp too
    if devices % given or "dp" in known and fsdp == 1 and devices not in (0, given):
        raise ValueError(
            f"tp={tp} pp={pp} cp={cp} and dp make {given} devices, and it ran on {devices}"
        )
    if ep > 1 and fsdp % ep == 0:
        fsdp //= ep
    elif ep > 1 and data % ep == 0 and fsdp == 1:
        data //= ep
    if fsdp > 1 or ep > 1 and not known.get("dp"):
        data = max(1, devices // (tp * pp * cp * fsdp * ep)) if devices else known.get("dp", 1)
    return MeshShape(pp=pp, dp=data, fsdp=fsdp, ep=ep, sp=cp, tp=tp), slices


def _batch(known: dict, mesh: MeshShape, software: str) -> tuple[int, int]:
    """Return the sequences of a microbatch on a data rank, and microbatches."""
    ranks = mesh.dp * mesh.fsdp * mesh.ep
    rows, many = known.get("micro_batch"), known.get("microbatches")
    if "per_device_batch" in known:
        rows = known["per_device_batch"] * mesh.size // ranks
    whole = known.get("batch", 0) / ranks
    if not rows and not whole:
        raise ValueError("it gives no batch: batch, micro_batch or per_device_batch")
    if not rows and not many and whole > 1 and software not in WHOLE_BATCH:
        raise ValueError(f"it gives no microbatch, and each of {ranks} data ranks has {whole:g} sequences of"
                         f" the batch; say micro_batch or microbatches")  # fmt: skip
    rows = rows or max(1, whole // (many or 1))
    return max(1, round(rows)), many or max(1, round(whole / rows))


def _recompute(known: dict, source: dict, run: Run) -> Any:
    policy = known.get("recompute", source["recompute"])
    if policy not in ("auto", *POLICIES):
        raise ValueError(
            f"recompute '{policy}' is not known; known are auto, {', '.join(POLICIES)}"
        )
    if policy != "auto":
        return policy
    return next((p for p in POLICIES if fits_memory(replace(run, recompute=p))), "block")


def _measured(results: dict, run: Run) -> dict[str, Any]:
    """Return the seconds of a step from the first of `_MEASURED` that is there; GB; whether it fitted."""
    keys = {what: key for key, what in reversed(_MEASURED.items()) if results.get(key) is not None}
    key, unit = keys.get("step_s", ""), keys.get("memory", "")
    step: Any = results.get(key)
    memory, fits = results.get(unit), results.get(keys.get("fits", ""))
    devices = run.mesh.size / (run.chip.devices_per_chip if key.endswith("chip") else 1)
    if key == "ms":
        step /= 1e3
    elif key.startswith("tok") or key == "off":
        step = run.tokens_per_step / devices / step
    elif key == "mfu_pct":
        step = run.flops() / (run.chip.per_device().flops_per_s * run.mesh.size) / step * 100
    elif key.startswith("tflops"):
        step = run.flops() / devices / step / 1e12
    if memory and unit.endswith("gib"):
        memory *= 2**30 / 1e9
    return {
        "step_s": step,
        "memory_gb": memory,
        "fits": True if fits is None and (step or memory) else fits,
    }


# ------------------------------------------------------------------------------------- memory by the textbook


def textbook_bytes(run: Run, allocated: bool = False) -> dict[str, float]:
    """Return the bytes on the fullest device of another framework's run, by part: the textbook's sums, stage
    by stage (Rajbhandari et al. 2020, section 3; Korthikanti et al. 2022, section 4). ``allocated``: without
    what the framework takes itself. Of plans of ours: `predict.memory`."""
    parts = max(
        (_stage(run, stage) for stage in range(run.mesh.pp)), key=lambda parts: sum(parts.values())
    )
    if not allocated:
        parts["framework"] = run.software.overhead_bytes * (run.chip.link == "switch")
    return parts


def fits_memory(run: Run) -> bool:
    """Tell whether the run fits its chip's memory, all of which other frameworks than JAX may take."""
    return sum(textbook_bytes(run).values()) <= run.chip.usable_hbm_gib * 2**30 * (1 - _FRAGMENTS)


def _stage(run: Run, stage: int) -> dict[str, float]:
    soft, mesh, ends = run.software, run.mesh, run.ends
    counts = run.stage_kinds(stage)
    layers = sum(counts)
    first, last = stage == 0, stage == mesh.pp - 1
    names = "attention copies vectors ffn router".split()
    per_kind = list(zip(counts, run.sizes, strict=True))
    shared = sum(count * s[name] for count, s in per_kind for name in names)
    shared += first * ends["embedding"] + last * (
        ends["head"] or (ends["embedding"] if mesh.pp > 1 else 0.0)
    )
    shared /= mesh.tp
    experts = sum(count * s["experts"] for count, s in per_kind) / mesh.ep
    weights = grads = state = gathered = 0.0
    for params, apart in ((shared, 1), (experts, mesh.ep)):
        group = run.zero_group / apart
        ranks = run.data_ranks * mesh.sp / apart
        if run.config.lora:  # frozen: 16 bits, and nothing of the optimizer
            weights += 2 * params / (group if run.zero == 3 else 1)
            continue
        cut = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (group, group, group)}[
            run.zero
        ]
        weights += params * soft.weight_bytes / cut[0]
        grads += params * soft.grad_bytes / cut[1]
        state += params * soft.state_bytes / cut[2]
    if run.zero == 3 and not run.reshard:  # whole until the last microbatch
        gathered = (shared + experts) * (soft.gathered_bytes + soft.grad_bytes)
    elif run.zero == 3:
        matrix = max(max(s["ffn"], s["experts"] / mesh.ep) for s in run.sizes) / run.ffn_products
        layer = (shared + experts - first * ends["embedding"] / mesh.tp) / max(1, layers)
        body = layer if soft.eager else matrix / mesh.tp  # XLA gathers matrix by matrix
        # the next layer's travel meanwhile
        largest = max(2 * body, first * ends["embedding"] / mesh.tp)
        gathered = largest * (soft.gathered_bytes + soft.reduced_bytes)
    elif not soft.weight_bytes:  # a cast copy of all weights
        gathered = (shared + experts) * soft.gathered_bytes
    kept, working = activation_bytes(run)
    alive = _alive(run, stage)
    logits = run.tokens * run.config.vocab_size / mesh.tp * last
    return {
        "weights": weights,
        "gradients": grads,
        "optimizer": state,
        "gathered weights": gathered,
        "activations": 0.0 if run.offload else kept * layers * alive,
        "messages": 2.0
        * soft.messages
        * run.stream_tokens
        * run.config.width
        * alive
        * (mesh.pp > 1),
        "working set": max(working, logits * soft.logit_bytes),
    }


def _alive(run: Run, stage: int) -> float:
    """Return the microbatches that stage i has under way at once: 1F1B p - i, with v chunks more (Narayanan
    2021); GPipe all."""
    p, m, v = run.mesh.pp, run.microbatches, run.virtual_stages
    if run.schedule == "gpipe":
        return m
    if p == 1:
        return 1
    if v > 1:
        return min(m, (2 * (p - stage - 1) + (v - 1) * p + 1) / v)
    return min(m, p - stage)


def activation_bytes(run: Run) -> tuple[float, float]:
    """Return the bytes that a layer keeps for its backward pass, and those that this pass works with, of a
    microbatch on a device. GPT in 16 bits: sbh(10 + 24/t), and 5as/h of unfused scores (Korthikanti et al.
    2022, eq. 2)."""
    c, tp, experts = run.config, run.mesh.tp, run.config.experts
    d, t = c.width, run.tokens
    stream = 2.0 * run.stream_tokens * d
    heads = 2.0 * t * (2 * c.num_heads + 2 * run.kv_heads(c)) * c.head_width / tp
    visits = experts.top_k + experts.num_shared if experts else 1
    inner = 2.0 * t * run.ffn_products * c.ffn_width / tp * visits
    if experts:
        inner += 2 * experts.top_k * 2.0 * t * d
    # what queries, and keys and values, are made from
    heads += 2.0 * t * sum(weight.shape[1] for weight in shared_matrices(c))
    masks = stream if run.gpt and run.software.name.startswith("megatron") else 0.0
    scores = 5.0 * run.score_elements()
    whole = 2.0 * t * d
    full = (
        2 * stream
        + 2 * (stream if run.tp_sequence or tp == 1 else whole)
        + heads
        + inner
        + masks
        + scores
    )
    hidden = 0.0 if experts else inner * (run.ffn_products - 1) / run.ffn_products
    # every second one is computed again: up, not gate
    hidden /= 2 if run.software.selective_matmuls > 0 else 1
    results = 2 * stream + heads
    if run.software.kept_bits:  # of matmuls' inputs
        saved = 1 - min(16, run.bits) / 16
        out = 2.0 * t * c.num_heads * c.head_width / tp
        results -= saved * out
        full -= saved * (out + inner / run.ffn_products + 2 * stream)
    kept = {"none": full, "selective": results + hidden, "ffn": results, "block": stream}
    return kept[run.recompute], full if run.recompute == "block" else full / 2


# ----------------------------------------------------------------------------------- predicted and measured


def against(path: str | Path, own: dict[str, hardware.Rates] | None = None) -> dict[str, Any]:
    """Return the document of ``llmpar plan --against``: each run predicted and measured; each sweep's rank
    correlation, and what its first choice costs over the best; what was left out, with the reason."""
    cases, left = read_runs(path)
    if not cases:
        why = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "it is empty"
        raise ValueError(f"'{path}' holds no run to compare: {why}")
    rows = [_row(case, own) for case in cases]
    errors = lambda key: [abs(row["error"][key]) for row in rows if key in row["error"]]
    step, memory = errors("step_s"), errors("memory_gb")
    return {
        "rows": rows,
        "groups": _sweeps(cases, rows),
        "left_out": [{"id": name, "why": why} for name, why in left.items()],
        "summary": {
            "runs": len(rows),
            "step_mean_abs_error": statistics.mean(step) if step else None,
            "step_median_abs_error": statistics.median(step) if step else None,
            "memory_median_abs_error": statistics.median(memory) if memory else None,
            "fits_wrong": sum(row["error"].get("fits", False) for row in rows),
        },
    }


def _row(case: Case, own: dict[str, hardware.Rates] | None) -> dict[str, Any]:
    run, measured = case.run, case.measured
    time = step_time(run, (own or {}).get(run.chip.name))
    parts = textbook_bytes(run, _source(case.source)["allocated"])
    predicted = {
        "step_s": time.step_s,
        "memory_gb": sum(parts.values()) / 1e9,
        "fits": fits_memory(run),
    }
    error = {
        key: predicted[key] / measured[key] - 1 for key in ("step_s", "memory_gb") if measured[key]
    }
    if measured["fits"] is not None:
        error["fits"] = predicted["fits"] != measured["fits"]
    return {
        "id": case.id,
        "chip": run.chip.name,
        "mesh": str(run.mesh),
        "recompute": run.recompute,
        "predicted": predicted,
        "measured": {key: value for key, value in measured.items() if value is not None},
        "error": error,
        "terms": time.terms,
        "memory_bytes": parts,
    }


def _sweeps(cases: list[Case], rows: list[dict]) -> list[dict[str, Any]]:
    """Return the sweeps of a group, and runs of several groups that differ in how they are cut alone: three
    or more."""
    alike, listed = dict[Any, list[int]](), dict[str, list[int]]()
    model = lambda i: replace(cases[i].run.config, name="")
    for i, case in enumerate(cases):
        if case.measured["step_s"]:
            run = case.run
            what = (
                run.tokens_per_step,
                run.seq_len,
                run.mesh.size,
                run.chip.name,
                run.bits,
                case.source,
            )
            alike.setdefault((model(i), *what), []).append(i)
            listed.setdefault(case.group, []).append(i)
    listed = {group: indices for group, indices in listed.items() if len(indices) > 2}
    for indices in alike.values():
        groups = {cases[i].group for i in indices}
        if len(groups) > 2:
            listed[os.path.commonprefix(sorted(groups)).rstrip("./") + " …"] = indices
    sweeps = []
    for name, indices in listed.items():
        predicted = [rows[i]["predicted"]["step_s"] for i in indices]
        measured = [cases[i].measured["step_s"] for i in indices]
        comparable = len({(cases[i].run.tokens_per_step, model(i)) for i in indices}) == 1
        first = measured[predicted.index(min(predicted))]
        sweeps.append(
            {
                "id": name,
                "runs": len(indices),
                "spearman": spearman(predicted, measured),
                "choice_over_best": first / min(measured) if comparable else None,
                "step_mean_abs_error": statistics.mean(
                    abs(rows[i]["error"]["step_s"]) for i in indices
                ),
            }
        )
    return sweeps


def spearman(a: list[float], b: list[float]) -> float:
    """Return the rank correlation (Spearman 1904): Pearson's of the ranks, ties by their mean rank."""
    x, y = (
        [sorted(values).index(v) + (values.count(v) - 1) / 2 for v in values] for values in (a, b)
    )
    return statistics.correlation(x, y) if len(set(x)) > 1 < len(set(y)) else 0.0


def tell_tale(row: dict[str, Any]) -> str:
    """Return the term that a row's error could be of: the smallest that is as large as the error, or the
    largest."""
    off = abs(row["predicted"]["step_s"] - row["measured"]["step_s"])
    terms = sorted(row["terms"].items(), key=lambda item: item[1])
    return next((name for name, seconds in terms if seconds >= off), terms[-1][0])
