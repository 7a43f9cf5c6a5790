"""Families that run: what their layers compute, as the fields of a kind of layers, by the same tables."""

import math
from typing import Any

from llmpar.files import Allowed

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh")
"""What Hugging Face calls those that are implemented."""
STARTS: dict[str, dict[str, float]] = {
    "A_log": {"std": 1.5},
    "dt_bias": {"fill": 1.0},
    "out_norm": {"fill": 1.0},
    **dict.fromkeys(("q_conv", "k_conv", "v_conv"), {"std": 0.5}),
}
"""How the vectors of a gated delta net start: as in `transformers`, but for its rates of forgetting, whose
logarithm is A_log. They lie between 0.05 and 20 for most heads."""
MEDIA = "vision_config", "audio_config"  # of a file that has parts for other media than text
_LLAMA3 = "factor", "low_freq_factor", "high_freq_factor"


class NotImplementedHere(ValueError):
    """A model that asks for what is not implemented: it may still be planned."""


def check_file(file: dict[str, Any], family: dict[str, Any], unread: list[str]) -> None:
    """Refuse, by its key, what a whole file asks for and is not implemented; and keys that nothing reads."""
    if unread:
        raise NotImplementedHere(f"its keys {', '.join(unread)} are not read")
    if not _is_read(quantization := file.get("quantization_config")):
        what = "its weights are quantized (quantization_config), of which fp8 in blocks (e4m3) and mxfp4 are"
        raise NotImplementedHere(
            f"{what} read, not {quantization!r:.60}; use the model in bfloat16"
        )
    media = [key for key in MEDIA if file.get(key)]
    if media and not family.get("beside_media"):
        raise NotImplementedHere(f"it has a part for other media ({media[0]})")
    for key, value in family["needs"].items():
        allowed = value if isinstance(value, list) else [value]
        if file.get(key) not in (None, *allowed):
            only = " or ".join(map(repr, allowed))
            raise NotImplementedHere(f"{key} is {file[key]!r:.40}, and only {only} is implemented")


def _is_read(quantization: Any) -> bool:
    """Whether weights of a file are not quantized, or as `training.quantized` reads them."""
    if not isinstance(quantization, dict):
        return quantization is None
    method, numbers, block = map(quantization.get, ("quant_method", "fmt", "weight_block_size"))
    pair = isinstance(block, list) and [type(n) for n in block] == [int, int] and min(block) > 0
    return method == "mxfp4" or method == "fp8" and numbers in ("e4m3", "float8_e4m3fn") and pair


def fields(layer: Any, family: dict[str, Any], mixer: str, kind: dict[str, Any]) -> dict[str, Any]:
    """Return further fields of a kind of layers of a family that runs; ``layer`` reads expressions."""
    if mixer not in ("full_attention", "sliding_attention", family.get("runs_also")):
        raise NotImplementedHere(f"a layer '{mixer}' is not implemented")
    is_recurrent = kind["mixer"] == "recurrent"
    if is_recurrent and layer.get("linear_num_value_heads % linear_num_key_heads"):
        what = "linear_num_value_heads is no multiple of linear_num_key_heads"
        raise NotImplementedHere(f"{what}, so that heads do not share keys evenly")
    ruled = layer.get(family["rule"])
    alike = mixer == ruled or mixer == "full_attention" and not layer.get("sliding_window")
    if not alike and not family.get("reads_layer_types"):
        raise NotImplementedHere("layer_types is in the file, and its family does not read it")
    layer = layer.with_letters({"mixer": repr(mixer)})
    values = lambda table: {name: layer.get(text) for name, text in family[table].items()}
    given = lambda table: {name: x for name, x in values(table).items() if x is not None}
    model, variant = given("model"), given("variant")
    name = variant.get("activation")
    if name != "clamped" and (name := ACTIVATIONS.get(str(name))) is None:
        raise NotImplementedHere(f"activation {variant['activation']!r:.40} is not implemented")
    rope = _rope_of(layer.file, family, mixer)
    head_width, usual = kind["head_width"], family.get("partial", 1.0)
    share = _number(rope, "partial_rotary_factor", usual)
    if share != usual and "partial" not in family:
        what = f"partial_rotary_factor is {share}, and its family rotates whole heads"
        raise NotImplementedHere(what)
    width = int(head_width * share)
    if "rope_width" not in variant and width != head_width and not is_recurrent:
        variant["rope_width"] = width
    theta = _number(rope, "rope_theta", model["rope_theta"])
    scaling = _scaling(
        {} if is_recurrent else rope, layer.file, family, variant.get("rope_width", width) // 2
    )
    latent = kind["described"]["cache_width"]
    if latent and scaling and (all_dim := _number(rope, "mscale_all_dim", 0)):
        variant["score_scale"] = head_width**-0.5 * _mscale(scaling["factor"], all_dim) ** 2
    experts = kind["experts"] and kind["experts"] | given("routing")
    if experts and "renormalise" in experts:
        experts["renormalise"] = bool(experts["renormalise"])
    variant["activation"] = name
    result = model | {"rope_theta": theta, "rope_scaling": scaling}
    return result | {"variant": variant, "experts": experts}


def started(rows: list[Any], kind: dict[str, Any], num_layers: int) -> list[Any]:
    """Return rows with how they start (`model_config.Weight`): matrices with the deviation that the file
    gives, what ends in the residual stream with a smaller one (Radford et al. 2019, section 2.3)."""
    std, offset = kind["init_scale"], kind["variant"].get("norm_offset", 0.0)
    experts = kind["experts"]
    if experts and experts.get("bias_rate") is not None and any("experts" in x for x, _ in rows):
        bias = {"dims": "balance e", "shape": [experts["num_experts"]], "is_vector": True}
        rows = [*rows, ("experts.bias", bias)]

    def start(path: str, row: dict[str, Any]) -> dict[str, Any]:
        if (name := path.rpartition(".")[2]) in STARTS:
            return STARTS[name]
        if row["is_vector"]:
            return {"fill": 1.0 - offset if path.endswith("scale") else 0.0}
        last = path.endswith((".o", ".down"))
        return {"std": std / (2 * num_layers) ** 0.5 if last else std}

    return [(path, row | start(path, row)) for path, row in rows]


def _rope_of(file: dict[str, Any], family: dict[str, Any], mixer: str) -> dict[str, Any]:
    """Return the entries on rotary embedding that count for a layer: of both spellings, and of tables by the
    names of layers."""
    rope = file.get("rope_scaling") or file.get("rope_parameters") or family.get("rope", {})
    if not isinstance(rope, dict):
        raise NotImplementedHere(f"rope_scaling is {rope!r:.40}, and no table")
    outer = {key: file[key] for key in ("partial_rotary_factor",) if file.get(key) is not None}
    if any(isinstance(value, dict) for value in rope.values()):
        return outer | (rope[mixer] if isinstance(rope.get(mixer), dict) else {})
    if "rope_of" in family and file.get("rope_parameters") and not file.get("rope_scaling"):
        what = "rope_parameters has no table for each kind of layers"
        raise NotImplementedHere(f"{what}, and its family reads no other")
    first = {key: file[key] for key in ("original_max_position_embeddings",) if file.get(key)}
    return outer | (rope | first if mixer in family.get("rope_of", [mixer]) else {})


def _number(table: dict[str, Any], key: str, default: float, least: float = 0) -> float:
    """Return a number of a table, or the default where it has none; refuse others by name."""
    if (value := table.get(key)) is None:
        return default
    Allowed(float, least, 1e15).check(key, value)
    return value


def _scaling(
    rope: dict[str, Any], file: dict[str, Any], family: dict[str, Any], num_pairs: int
) -> dict[str, Any] | None:
    """Return the fields of a `model_config.RopeScaling`."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    kind = "longrope" if kind in family.get("longrope", []) else kind
    if kind not in ("llama3", "linear", "yarn", "longrope"):
        raise NotImplementedHere(f"rope type {kind!r:.40} is not implemented")
    longest = _number(file, "max_position_embeddings", 8192, 1)
    original = _number(rope, "original_max_position_embeddings", longest, 1)
    factor = _number(rope, "factor", longest / original)
    scaling: dict[str, Any] = {"kind": kind, "factor": factor}
    if kind == "llama3" and (lacks := [key for key in _LLAMA3 if rope.get(key) is None]):
        raise ValueError(f"rope_scaling lacks '{lacks[0]}', which its rope type needs")
    low, high = _number(rope, "low_freq_factor", 1.0), _number(rope, "high_freq_factor", 4.0)
    if kind == "yarn":
        low, high = _number(rope, "beta_slow", 1.0), _number(rope, "beta_fast", 32.0)
        own, of_all = (_number(rope, key, 0) for key in ("mscale", "mscale_all_dim"))
        usual = _mscale(factor, own if own and of_all else 1)
        usual /= _mscale(factor, of_all) if own and of_all else 1
        scaling["attention_factor"] = _number(rope, "attention_factor", usual)
        scaling["truncate"] = rope.get("truncate", True)
    if kind == "longrope":
        usual = math.sqrt(1 + math.log(max(factor, 1)) / math.log(max(original, 2)))
        scaling["attention_factor"] = _number(rope, "attention_factor", usual)
        scaling["factor"] = max(factor, 1)  # attention_factor has it
        for key in ("short_factor", "long_factor"):
            scaling[f"{key}s"] = _factors(rope, key, num_pairs)
    ends = {"low_freq_factor": low, "high_freq_factor": high, "original_context": int(original)}
    return scaling | (ends if kind != "linear" else {})


def _factors(rope: dict[str, Any], key: str, num_pairs: int) -> tuple[float, ...]:
    """Return a list of a table, with a number for each pair; refuse others by name."""
    value = rope.get(key)
    if not isinstance(value, list) or len(value) != num_pairs:
        what = f"{key} of rope_scaling is {value!r:.40}"
        raise ValueError(f"{what}; use a list of {num_pairs} numbers, one for each pair")
    for number in value:
        Allowed(float, 1e-9, 1e9).check(key, number)
    return tuple(value)


def _mscale(factor: float, times: float) -> float:
    """Return how much larger YaRN makes queries and keys for a context ``factor`` times as long (Peng et al.
    2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * times * math.log(factor) + 1
