"""Reads published runs, and holds the model of time and memory against them.

A file is a list of groups. A group has an ``id``, a ``source``, ``inputs`` (what was run) and ``expected``
(what was measured). A sweep lists ``configs`` under ``columns``, or ``rows`` whose last columns are measured;
any input may be a list as long as what was measured. `INPUTS` and `MEASURED` are the keys; a group with an
unknown one is refused by name. What a source says of all its runs, and no row repeats, is in `SOURCES`.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmpar.config import PRESETS, ExpertConfig, LatentAttention, ModelConfig
from llmpar.files import read_json
from llmpar.notation import MeshShape
from llmpar.predict import hardware, held
from llmpar.predict.hardware import Chip
from llmpar.predict.rates import Rates
from llmpar.predict.time import step_time
from llmpar.predict.workload import POLICIES, SOFTWARE, Run

INPUTS = {
    # the model
    "model": "a preset's or a published model's name",
    "params": "parameters, where no dims are given; or a size such as '32b' (MaxText's scaled model)",
    "params_b": "the same in billions, for the reader",
    "h": "width",
    "d": "width",
    "layers": "layers; beside a model's name, so many of its layers",
    "heads": "query heads; null: 128 wide each",
    "kv_heads": "KV heads",
    "ffn": "width of the feed-forward",
    "vocab": "vocabulary",
    "experts": "experts of a layer, each of width ffn",
    "top_k": "experts that a token visits",
    "topk": "the same",
    "shared_experts": "experts that every token visits",
    "activation": "'… two matrices' where the feed-forward has no gate",
    "seq": "tokens of a sequence",
    # the machine
    "chip": "a chip's name, perhaps with the rate of its network",
    "gpus": "JAX devices",
    "devices": "JAX devices",
    "chips": "chips",
    "nodes": "nodes of 8",
    "slices": "slices that the data centre's network joins",
    "hardware": "slices in words: '2x v5p-128'",
    # the cut
    "mesh": "axes as 'fsdp=-1 tp=4'",
    "dp": "data ranks (Megatron's: those of ep among them)",
    "fsdp": "ranks of ZeRO-3; 0 or null: none",
    "tp": "tensor ranks",
    "pp": "pipeline stages",
    "cp": "context ranks (our sp)",
    "ep": "expert ranks, of the data ranks",
    "vp": "chunks of a stage (virtual_stages)",
    "zero": "ZeRO stage",
    # the step
    "batch": "sequences of a step",
    "micro_batch": "sequences of a microbatch",
    "microbatches": "microbatches of a step",
    "grad_accum": "microbatches of a step",
    "local_batch": "sequences of a device",
    "per_device_batch": "sequences of a device",
    "recompute": "none, selective, ffn or block; auto: the least that fits",
    "full_recompute": "true: block",
    "activation_checkpointing": "true: block; false: none",
    "remat": "MaxText's policy",
    "schedule": "the pipeline's",
    "precision": "FP8, or anything else",
    "software": "a row of workload.SOFTWARE",
    "options": "words: of a sum of gradients in float32, of embeddings that count as layers of a pipeline",
    # words for the reader
    "measured_on": "",
    "megatron": "",
    "columns": "the names of a sweep's columns",
    "configs": "a sweep's rows",
}
MEASURED = {
    "sec_per_iter": "step_s", "sec_per_step": "step_s", "step_s": "step_s", "ms": "step_s",
    "tokens_per_s_per_gpu": "step_s", "tokens_per_s_per_device": "step_s", "tok_s_gpu": "step_s",
    "tokens_per_s_per_chip": "step_s", "tflops_per_gpu": "step_s", "tflops_per_chip": "step_s",
    "tflops_per_device": "step_s", "off": "step_s",
    "mfu_pct": "step_s", "mem_gb": "memory", "mem_gib": "memory", "alloc_gib": "memory",
    "fits_80GB": "fits", "fits_80gb": "fits", "fits_40GB": "fits", "fits": "fits",
}  # fmt: skip
"""What was measured, and which of our answers it is held against. The rest of ``expected`` is derived."""
BITS = {"FP8": 8, "MXFP8": 8, "INT8": 8, "MXFP4": 4, "NVFP4": 4}
"""Of the operands of products, by how a precision's name begins; others have 16."""
IN_FLOAT32 = re.compile(r"(fp32|float32)[\w ]*(grad|accum)|(grad|accum)[\w ]*(fp32|float32)", re.IGNORECASE)
"""Options of a run whose gradients are summed up in float32, where its framework also does so in 16 bits."""
NETWORKS = {"800 gb/s per node of 8": 12.5e9, "400 gb/s per gpu": 50e9}


@dataclass(frozen=True)
class Source:
    """What a publication says of all its runs: defaults of `INPUTS`, and facts that no key states."""

    software: str
    chip: str = ""
    gpt: bool = False
    ffn_products: int = 3
    zero: int = 1
    tp_sequence: bool = False
    tp_overlap: bool = False
    recompute: str = "auto"
    context_parallel: Any = "ring"
    expert_tp: bool = False
    balanced: bool = True
    allocated: bool = False  # memory is what the allocator gave, not what the driver sees
    network_bytes_per_s: float = 0.0
    full_attention: bool = True  # TFLOP/s count attention's whole square
    inputs: dict[str, Any] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)  # by the model's width


SOURCES = {
    "bigscience": Source(
        "megatron-deepspeed", "a100-80", gpt=True, ffn_products=2, network_bytes_per_s=6.25e9,
        recompute="block", heads={14_336: 64, 14_400: 96},
    ),
    "vTrain": Source(
        "megatron-2021", "a100-80", gpt=True, ffn_products=2, zero=0, recompute="none",
        inputs={"vocab": 51_200},
    ),
    "dgxc-benchmarking": Source("megatron", "h100", tp_sequence=True, tp_overlap=True),
    "Megatron-Bridge": Source("megatron", "h100", tp_sequence=True, tp_overlap=True),
    "SimuMax": Source(
        "megatron", "b200", tp_sequence=True, context_parallel="ulysses", allocated=True,
        recompute="none",
    ),
    "llm-foundry": Source(
        "composer", gpt=True, ffn_products=2, zero=3, network_bytes_per_s=25e9, inputs={"vocab": 50_368}
    ),
    "torchtitan": Source("fsdp", "h100", zero=3, tp_sequence=True, allocated=True, balanced=False),
    "tpu-recipes": Source("maxtext", zero=3, tp_sequence=True),
    "gpu-recipes": Source("maxtext", zero=3, tp_sequence=True),
    "maxtext": Source(
        "maxtext", "h100", zero=3, tp_sequence=True, network_bytes_per_s=12.5e9,
        inputs={"per_device_batch": 4, "seq": 4096},
    ),
}  # fmt: skip
"""By a word of a group's ``source``. BigScience: 4 Omni-Path links of 100 Gb/s per node of 8. MaxText's runs
of Llama 2 on A3: four sequences of 4,096 a device, gradients summed over nodes, 800 Gb/s a node
(configs/models/gpu/llama2_7b.yml)."""


def _latent(name, vocab, width, layers, heads, ffn, experts, q_rank=1536) -> ModelConfig:
    mla = LatentAttention(q_rank, 512, 64, 128)
    return ModelConfig(name, vocab, width, layers, heads, heads, 192, ffn, experts=experts, latent=mla)


def _experts(name, vocab, width, layers, heads, kv_heads, head_width, ffn, *experts, **more) -> ModelConfig:
    many = ExpertConfig(*experts, **more)
    return ModelConfig(name, vocab, width, layers, heads, kv_heads, head_width, ffn, experts=many)


MODELS = {
    "llama-3-8b": PRESETS["llama3-8b"],
    "llama-3.1-8b": PRESETS["llama3-8b"],
    "llama-3-70b": PRESETS["llama3-70b"],
    "llama-3.1-70b": PRESETS["llama3-70b"],
    "llama-3.3-70b": PRESETS["llama3-70b"],
    "llama3-70b dims": PRESETS["llama3-70b"],
    "llama3-8b dims": PRESETS["llama3-8b"],
    "llama-3-405b": PRESETS["llama3.1-405b"],
    "llama-3.1-405b": PRESETS["llama3.1-405b"],
    "llama3-405b dims": PRESETS["llama3.1-405b"],
    "llama-2-7b": PRESETS["llama2-7b"],
    "llama-2-13b": PRESETS["llama2-13b"],
    "llama-2-70b": PRESETS["llama2-70b"],
    "mixtral-8x7b dims": PRESETS["mixtral-8x7b"],
    "deepseek-v3 dims": PRESETS["deepseek-v3"],
    "deepseek-r1": PRESETS["deepseek-v3"],
    "deepseek-v2": _latent(
        "deepseek-v2", 102_400, 5120, 60, 128, 1536,
        ExpertConfig(160, 6, num_shared=2, dense_layers=1, dense_width=12_288),
    ),
    "qwen3-235b-a22b": _experts("qwen3-235b-a22b", 151_936, 4096, 94, 64, 4, 128, 1536, 128, 8),
    "qwen3-next-80b-a3b": _experts(
        "qwen3-next-80b-a3b", 151_936, 2048, 48, 16, 2, 256, 512, 512, 10, num_shared=1
    ),
    "gpt-oss-120b": _experts("gpt-oss-120b", 201_088, 2880, 36, 64, 8, 64, 2880, 128, 4),
    "gpt-oss-20b": _experts("gpt-oss-20b", 201_088, 2880, 24, 64, 8, 64, 2880, 32, 4),
    "gemma2-9b": ModelConfig("gemma2-9b", 256_000, 3584, 42, 16, 8, 256, 14_336, tied=True),
    "gemma2-27b": ModelConfig("gemma2-27b", 256_000, 4608, 46, 32, 16, 128, 36_864, tied=True),
    "gpt3-175b": ModelConfig("gpt3-175b", 50_304, 12_288, 96, 96, 96, 128, 49_152),
    "nemotron4-15b": ModelConfig("nemotron4-15b", 256_000, 6144, 32, 48, 8, 128, 24_576),
    "nemotron4-340b": ModelConfig("nemotron4-340b", 256_000, 18_432, 96, 96, 8, 192, 73_728),
    "grok1": _experts("grok1", 131_072, 6144, 64, 48, 8, 128, 32_768, 8, 2),
}  # fmt: skip
"""Models that published runs name, by their authors' configurations."""


@dataclass(frozen=True)
class Case:
    """One measured run: what was run, and what was measured (``step_s``, ``memory_gb``, ``fits``)."""

    id: str
    group: str
    run: Run
    measured: dict[str, Any]
    source: str = ""


def read(path: str | Path) -> tuple[list[Case], dict[str, str]]:
    """The cases of a file, and the groups that cannot be held against the model, with the reason."""
    groups = read_json(path, "measured runs", list)
    if not all(isinstance(g, dict) and "id" in g for g in groups):
        raise ValueError(f"'{path}' is no list of groups, each with an id, inputs and expected")
    cases, left = list[Case](), dict[str, str]()
    for group in groups:
        try:
            cases += list(_cases(group))
        except ValueError as why:
            left[str(group["id"])] = str(why)
        except (TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
            what = f"{type(error).__name__}: {error}"
            left[str(group["id"])] = f"an input has a value that it cannot have, or one is missing ({what})"
    return cases, left


def _cases(group: dict) -> Iterator[Case]:
    inputs, expected = dict(group.get("inputs", {})), dict(group.get("expected", {}))
    columns = group.get("columns") or inputs.pop("columns", None)
    what = group.get("rows") or inputs.pop("configs", None)
    if columns and what:
        named = [dict(zip(columns, row, strict=True)) for row in what]
        for i, row in enumerate(named):
            own = {k: v for k, v in row.items() if k in MEASURED}
            shared = {k: v[i] for k, v in expected.items() if isinstance(v, list) and len(v) == len(named)}
            rest = {k: v for k, v in row.items() if k not in own}
            yield _case(f"{group['id']}/{i}", group, inputs | rest, own | shared)
        return
    lists = {k: v for k, v in inputs.items() if isinstance(v, list)}
    found = {k: v for k, v in expected.items() if k in MEASURED}
    if not found:
        raise ValueError("it holds no step time, memory or fit: nothing to compare")
    if not lists:
        yield _case(group["id"], group, inputs, found)
        return
    for i in range(max(map(len, lists.values()))):
        one = inputs | {k: v[i] for k, v in lists.items()}
        yield _case(
            f"{group['id']}/{i}",
            group,
            one,
            {k: v[i] if isinstance(v, list) else v for k, v in found.items()},
        )


def _source(group: dict) -> Source:
    for word, found in SOURCES.items():
        if word.lower() in group.get("source", "").lower():
            return found
    return Source(group.get("inputs", {}).get("software", "megatron"))


def _case(name: str, group: dict, inputs: dict, found: dict) -> Case:
    if unknown := sorted(set(inputs) - set(INPUTS)):
        raise ValueError(f"unknown inputs {', '.join(unknown)}; known are {', '.join(INPUTS)}")
    source = _source(group)
    known = source.inputs | {k: v for k, v in inputs.items() if v is not None}
    chip, links = _chip(known, source, group)
    config, ffn_products = _model(known, source, group)
    mesh, slices = _mesh(known, chip)
    if slices > 1 and chip.link == "torus":
        links = dataclasses.replace(links, node_size=max(1, mesh.size // slices // chip.devices_per_chip))
    ranks = mesh.dp * mesh.fsdp * mesh.ep
    rows, microbatches = _batch(known, ranks, mesh)
    software, options = SOFTWARE[known.get("software", source.software)], str(known.get("options", ""))
    if IN_FLOAT32.search(options):
        software = SOFTWARE.get(f"{software.name}-bf16", software)
    zero = known.get("zero", 3 if "fsdp" in known and known["fsdp"] and known["fsdp"] > 1 else source.zero)
    if mesh.fsdp > 1:
        zero = 3
        if software.name == "megatron":
            software = SOFTWARE["fsdp"]
    vp = known.get("vp", 1)
    run = Run(
        config, links, mesh, known["seq"], rows, microbatches, software, zero,
        schedule=_schedule(str(known.get("schedule", "")), vp),
        virtual_stages=vp,
        tp_sequence=source.tp_sequence and mesh.tp > 1,
        tp_overlap=(source.tp_overlap or chip.link == "torus") and mesh.tp > 1,
        ep_overlap=source.tp_overlap and vp > 1,
        context_parallel=source.context_parallel,
        ffn_products=ffn_products,
        gpt=source.gpt,
        bits=_bits(str(known.get("precision", "")), group.get("what", "")),
        slices=slices,
        expert_tp=source.expert_tp,
        balanced=source.balanced,
        ends_as_layers="embedding" in options and mesh.pp > 1,
    )  # fmt: skip
    for words, policy in SAID.items():
        if words in group.get("what", ""):
            known.setdefault("recompute", policy)
    run = dataclasses.replace(run, recompute=_recompute(known, source, run))
    may_offload = "mesh" in known or str(known.get("remat", "")).startswith("custom")
    if software.name == "maxtext" and may_offload and not held.fits(run):
        run = dataclasses.replace(run, offload=True)
    return Case(name, group["id"], run, _measured(found, run, source), group.get("source", ""))


def _bits(precision: str, what: str) -> int:
    said = "FP8" if "float8" in what else precision.upper()
    return next((bits for name, bits in BITS.items() if said.startswith(name)), 16)


def _schedule(said: str, chunks: int) -> str:
    """Our name of a schedule in words: '1f1b, no gradient buckets'."""
    if chunks > 1 or "interleaved" in said.lower():
        return "interleaved" if chunks > 1 else "1f1b"
    return "gpipe" if "gpipe" in said.lower() else "1f1b"


def _chip(known: dict, source: Source, group: dict) -> tuple[Chip, Chip]:
    said = str(known.get("chip", ""))
    words = f"{said} {group.get('source', '')} {known.get('hardware', '')}".lower()
    row = None
    for text in (said.lower(), words):
        hit = re.search(
            r"gb300|gb200|b300|b200|h200|h100|a100-40|a100|mi300x|mi250x|tpu7x|v6e|v5p|v5e|v4", text
        )
        if hit:
            row = hardware.chip(hit[0])
            break
    row = row or hardware.chip(source.chip or "h100")
    network = next((rate for text, rate in NETWORKS.items() if text in words), source.network_bytes_per_s)
    if "H100-96" in said:
        row = dataclasses.replace(row, usable_hbm_gib=row.usable_hbm_gib * 96 / 80)
    return row, dataclasses.replace(row, dcn_bytes_per_s=network) if network and row.link == "switch" else row


def _model(known: dict, source: Source, group: dict) -> tuple[ModelConfig, int]:
    words = f"{group.get('what', '')}, {group['id']}".lower().replace(" ", "-")
    if not {"model", "h", "d", "params"} & set(known):
        named = [name for name in sorted(MODELS | PRESETS, key=len) if name in words]
        sizes = re.findall(r"\b(8b|70b|405b)\b", group["id"].lower())
        named = named or [f"llama-3.1-{size}" for size in sizes]
        known |= {"model": named[-1]} if named else {}
    if "model" in known:
        name = str(known["model"]).lower().split(" (")[0]
        match = re.match(r"(.*?), (\d+) dense layers?", name)
        name = match[1] if match else name
        config = (
            MODELS.get(name)
            or MODELS.get(name.removesuffix(" dims"))
            or PRESETS.get(name.removesuffix(" dims"))
        )
        if config is None:
            raise ValueError(f"model '{known['model']}' is not known; give h, layers, heads, ffn and vocab")
        how = config.experts
        if how and match:
            how = dataclasses.replace(how, dense_layers=int(match[2]))
        kv = re.search(r"kv heads (\d+)", str(known["model"]).lower())
        changes: dict[str, Any] = {"experts": how, "num_layers": known.get("layers", config.num_layers)}
        if kv:
            changes["num_kv_heads"] = int(kv[1])
        return dataclasses.replace(config, **changes), 2 if "nemotron" in name else 3
    if re.fullmatch(r"\d+b", str(known.get("params", ""))):
        return _scaled(int(str(known["params"])[:-1])), 3
    width = known.get("h", known.get("d"))
    if not width or "layers" not in known:
        raise ValueError("it gives no dims of its model: h, layers, heads, ffn, vocab")
    heads = known.get("heads") or source.heads.get(width) or width // 128
    gated = source.ffn_products
    if "activation" in known:
        gated = 2 if "two matrices" in known["activation"] else 3
    config = ModelConfig(
        group["id"], known.get("vocab", 51_200), width, known["layers"], heads, known.get("kv_heads", heads),
        width // heads, known.get("ffn", 4 * width), tied=source.gpt,
    )  # fmt: skip
    if known.get("experts", 0) > 1:
        top = known.get("top_k", known.get("topk", 1))
        many = ExpertConfig(known["experts"], top, num_shared=known.get("shared_experts", 0))
        config = dataclasses.replace(config, experts=many)
    return config, gated


def _scaled(billions: int) -> ModelConfig:
    """MaxText's model of ``global_parameter_scale``: powers of two on heads and widths, then width, then
    depth."""
    base, rest = divmod(int(math.log2(billions)), 3)
    heads, width = base + (rest > 0), base + (rest > 1)
    return ModelConfig(
        f"maxtext-{billions}b",
        32_000,
        2048 << width,
        16 << base,
        16 << heads,
        16 << heads,
        128,
        7168 << heads,
    )


def _mesh(known: dict, chip: Chip) -> tuple[MeshShape, int]:
    slices = known.get("slices", 1)
    if found := re.match(r"(\d+)x ", str(known.get("hardware", ""))):
        slices = int(found[1])
    devices = known.get("gpus", known.get("devices", known.get("chips", 0) * chip.devices_per_chip))
    if "nodes" in known:
        return MeshShape(dp=known["nodes"], fsdp=8), 1
    if "mesh" in known:
        axes = {a: int(n) for a, n in re.findall(r"\b(data|dp|fsdp|tp|cp|pp|ep)=(-?\d+)", str(known["mesh"]))}
        sizes: dict[str, Any] = {
            "dp": axes.get("data", axes.get("dp", 1)),
            "fsdp": axes.get("fsdp", 1),
            "tp": axes.get("tp", 1),
        }
        sizes |= {"sp": axes.get("cp", 1), "pp": axes.get("pp", 1), "ep": axes.get("ep", 1)}
        if not axes:  # in words: '4 x the same'
            sizes["fsdp"] = 64
            sizes["dp"] = max(1, devices // 64)
        if sizes["fsdp"] == -1:
            sizes["fsdp"] = devices // slices // math.prod(n for a, n in sizes.items() if a != "fsdp")
        left = devices // math.prod(sizes.values()) if devices else 1
        if left > 1:
            sizes["dp"] *= left
        return MeshShape(**sizes), slices
    tp, pp, cp, ep = (known.get(a) or 1 for a in ("tp", "pp", "cp", "ep"))
    fsdp = known.get("fsdp") or 1
    data = known.get("dp") or max(1, devices // (tp * pp * cp))
    if fsdp == 1 and "grad_accum" in known and "dp" not in known and "tp" not in known:
        return MeshShape(fsdp=devices), slices
    if ep > 1 and fsdp % ep == 0:
        fsdp //= ep
    elif ep > 1 and data % ep == 0 and fsdp == 1:
        data //= ep
    if fsdp > 1 or ep > 1 and not known.get("dp"):
        fsdp_ranks = fsdp * ep
        data = max(1, devices // (tp * pp * cp * fsdp_ranks)) if devices else known.get("dp", 1)
    return MeshShape(pp=pp, dp=data, fsdp=fsdp, ep=ep, sp=cp, tp=tp), slices


def _batch(known: dict, ranks: int, mesh: MeshShape) -> tuple[int, int]:
    rows = known.get("micro_batch") or known.get("local_batch")
    if "per_device_batch" in known:
        rows = known["per_device_batch"] * mesh.size // ranks
    if rows is None and "batch" in known:
        rows = max(1, known["batch"] // ranks)
    if rows is None:
        raise ValueError("it gives no batch: batch, micro_batch, local_batch or per_device_batch")
    many = known.get("microbatches") or known.get("grad_accum")
    if many is None:
        many = max(1, round(known["batch"] / ranks / rows)) if "batch" in known else 1
    return max(1, round(rows)), many


SAID = {"full AC": "block", "per-op SAC": "selective"}
"""What a group's text says of recomputation, where no key does (torchtitan's words)."""
REMAT = {
    "full": "block",
    "minimal": "selective",
    "minimal_flash": "selective",
    "save_dot_with_context_except_mlp": "ffn",
}


def _recompute(known: dict, source: Source, run: Run) -> Any:
    if "full_recompute" in known:
        return "block" if known["full_recompute"] else "none"
    if "activation_checkpointing" in known:
        return "block" if known["activation_checkpointing"] else "none"
    said = known.get("recompute", REMAT.get(str(known.get("remat", "")), source.recompute))
    if said != "auto":
        return said
    return next((p for p in POLICIES if held.fits(dataclasses.replace(run, recompute=p))), "block")


def _measured(found: dict, run: Run, source: Source) -> dict[str, Any]:
    step = None
    for key in sorted(found, key=list(MEASURED).index):
        value = found[key]
        if MEASURED[key] != "step_s" or step is not None or value is None:
            continue
        per_device = run.tokens_per_step / run.mesh.size
        chips = run.mesh.size / run.chip.devices_per_chip
        if key == "ms":
            step = value / 1e3
        elif key.startswith("tok") or key == "off":
            step = per_device / value * (run.chip.devices_per_chip if key.endswith("chip") else 1)
        elif key == "mfu_pct":
            peak = run.chip.per_device().flops_per_s * run.mesh.size
            step = run.flops(causal=False) / peak / value * 100
        elif key.startswith("tflops"):
            many = chips if key.endswith("chip") else run.mesh.size
            step = run.flops(not source.full_attention) / many / value / 1e12
        else:
            step = value
    memory = next(
        (
            v * (2**30 / 1e9 if k.endswith("gib") else 1)
            for k, v in found.items()
            if MEASURED[k] == "memory" and v is not None
        ),
        None,
    )
    fits = next((v for k, v in found.items() if MEASURED[k] == "fits"), True if step or memory else None)
    return {"step_s": step, "memory_gb": memory, "fits": fits}


# ------------------------------------------------------------------------------------------- held against


def against(path: str | Path, own: dict[str, Rates] | None = None) -> dict[str, Any]:
    """The document of ``llmpar plan --against``: each run predicted, measured, and the error; each sweep's
    rank correlation, and what its first choice costs over the best; what was left out, with the reason."""
    cases, left = read(path)
    if not cases:
        why = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "it is empty"
        raise ValueError(f"'{path}' holds no run to compare: {why}")
    rows = [_row(case, own) for case in cases]
    errors = lambda key: [abs(row["error"][key]) for row in rows if row["error"].get(key) is not None]
    step, memory = errors("step_s"), errors("memory_gb")
    mean = lambda some, how: how(some) if some else None
    return {
        "rows": rows,
        "groups": _sweeps(cases, rows),
        "left_out": [{"id": name, "why": why} for name, why in left.items()],
        "summary": {
            "runs": len(rows),
            "step_mean_abs_error": mean(step, statistics.mean),
            "step_median_abs_error": mean(step, statistics.median),
            "memory_median_abs_error": mean(memory, statistics.median),
            "fits_wrong": sum(row["error"].get("fits", False) for row in rows),
        },
    }


def _row(case: Case, own: dict[str, Rates] | None) -> dict[str, Any]:
    run, measured = case.run, case.measured
    time = step_time(run, (own or {}).get(run.chip.name))
    allocated = any(word in case.source for word, s in SOURCES.items() if s.allocated)
    parts = held.held_bytes(run, allocated)
    predicted = {"step_s": time.step_s, "memory_gb": sum(parts.values()) / 1e9, "fits": held.fits(run)}
    error: dict[str, Any] = {
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
    """Runs of one model, batch and number of devices that differ in how they are cut, three or more."""
    alike: dict[Any, list[int]] = {}
    for i, case in enumerate(cases):
        run = case.run
        if case.measured["step_s"]:
            what = (
                _nameless(run.config),
                run.tokens_per_step,
                run.seq_len,
                run.mesh.size,
                run.chip.name,
                run.bits,
                case.source,
            )
            alike.setdefault(what, []).append(i)
    listed: dict[str, list[int]] = {}
    for group in dict.fromkeys(case.group for case in cases):
        mine = [i for i, case in enumerate(cases) if case.group == group and case.measured["step_s"]]
        if len(mine) > 2:
            listed[group] = mine
    for several in alike.values():
        groups = {cases[i].group for i in several}
        if len(several) > 2 and len(groups) > 2:
            prefix = _common([cases[i].group for i in several])
            listed[prefix] = several
    found = []
    for name, some in listed.items():
        predicted = [rows[i]["predicted"]["step_s"] for i in some]
        measured = [cases[i].measured["step_s"] for i in some]
        steps = {(cases[i].run.tokens_per_step, _nameless(cases[i].run.config)) for i in some}
        first = measured[predicted.index(min(predicted))]
        found.append(
            {
                "id": name,
                "runs": len(some),
                "spearman": spearman(predicted, measured),
                "choice_over_best": first / min(measured) if len(steps) == 1 else None,
                "step_mean_abs_error": statistics.mean(abs(rows[i]["error"]["step_s"]) for i in some),
            }
        )
    return found


def _nameless(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, name="")


def _common(names: list[str]) -> str:
    first, last = min(names), max(names)
    n = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:n].rstrip("./") + " …"


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation (Spearman 1904): Pearson's of the ranks, ties by their mean rank."""
    x, y = _ranks(a), _ranks(b)
    mean = (len(a) - 1) / 2
    top = sum((p - mean) * (q - mean) for p, q in zip(x, y, strict=True))
    below = math.sqrt(sum((p - mean) ** 2 for p in x) * sum((q - mean) ** 2 for q in y))
    return top / below if below else 0.0


def _ranks(values: list[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks, i = [0.0] * len(values), 0
    while i < len(order):
        j = i
        while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
            j += 1
        for k in range(i, j + 1):
            ranks[order[k]] = (i + j) / 2
        i = j + 1
    return ranks


def tell_tale(row: dict[str, Any]) -> str:
    """The term of a row's time that its error could be of: the smallest that is as large as what is missing,
    else the largest."""
    off = abs(row["predicted"]["step_s"] - row["measured"]["step_s"])
    terms = sorted(row["terms"].items(), key=lambda item: item[1])
    return next((name for name, seconds in terms if seconds >= off), terms[-1][0])
