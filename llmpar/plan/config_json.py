"""The ``config.json`` of Hugging Face models: what its entries may be where a field of ours means the same,
and models of those fields alone as such files; beside them, what says that weights are quantized."""

import pathlib
from typing import Any

from llmpar.files import Allowed, read_json, read_toml

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""Those of which most models need no field but ours; `families` reads them, as all others."""
TABLES = read_toml(pathlib.Path(__file__).with_suffix(".toml"), "table of names")
MODEL, ROPE, EXPERTS = (TABLES[part] for part in ("model", "rope", "experts"))
"""What they call our fields: a model's, its stretched rotary frequencies', its experts'."""
_OURS = MODEL | EXPERTS | TABLES["others"]
THEIR_OWN = {
    "hidden_act": Allowed(str),
    "rope_scaling": Allowed(dict, none=True),
    "rope_parameters": Allowed(dict, none=True),
    "use_sliding_window": Allowed(bool),
    "max_window_layers": Allowed(int, 0),
    "layer_types": Allowed(list, none=True),
    "decoder_sparse_step": Allowed(int, 1, 1 << 24),
    "mlp_only_layers": Allowed(list, none=True),
}
"""What fields that only they have may be."""


def check_entries(file: dict[str, Any], allowed: dict[str, Allowed]) -> None:
    """Refuse, by its key, an entry that is not what our field may be; a null where it does not mean to
    `transformers` that the entry is left out."""
    for key, value in file.items():
        if may := THEIR_OWN.get(key, allowed.get(_OURS.get(key, ""))):
            may._replace(none=may.none or key in TABLES["null"]).check(key, value)
    width, heads = file.get("hidden_size", 0), file.get("num_attention_heads", 1)
    if file.get("head_dim") is None and width % heads:
        what = f"hidden_size {width} is no multiple of its {heads} heads"
        raise ValueError(f"{what}, and no head_dim is given")


QUANTIZED = "hf_quant_config.json"
"""What NVIDIA's modelopt lays beside a config.json, which then still names the original model's numbers."""


def quantization(folder: str) -> str:
    """Return the numbers that `QUANTIZED` names for a folder's weights ("NVFP4"); '' where it is missing."""
    path = pathlib.Path(folder, QUANTIZED)
    if not path.exists():
        return ""
    entries = read_json(path, "quantization's configuration").get("quantization")
    numbers = entries.get("quant_algo") if isinstance(entries, dict) else None
    return numbers if isinstance(numbers, str) and numbers.isprintable() else "unnamed"


def stored_bytes(folder: str) -> int:
    """Return the bytes of a folder's weights, by the index of its shards or by its files."""
    files = [*pathlib.Path(folder).glob("*.safetensors")]
    for index in pathlib.Path(folder).glob("*.safetensors.index.json"):
        metadata = read_json(index, "index of weights").get("metadata")
        size: Any = metadata.get("total_size") if isinstance(metadata, dict) else None
        Allowed(int, 1, 1 << 50).check(f"metadata.total_size in '{index}'", size)
        return int(size)
    return sum(file.stat().st_size for file in files)


def family(model: dict[str, Any]) -> str:
    """Return the model_type of Hugging Face."""
    if model["experts"]:
        return "qwen3_moe" if model["qk_norm"] else "mixtral"
    if model["qkv_bias"]:
        return "qwen2"
    return "qwen3" if model["qk_norm"] else "mistral" if model["window"] else "llama"


def write_config(model: dict[str, Any]) -> dict[str, Any]:
    """Return what `presets.from_hugging_face` and `transformers` read as this model. Refuse what they have no
    name for."""
    model_type, experts, name = family(model), model["experts"], model["name"]
    if model["qkv_bias"] and model["qk_norm"]:
        raise ValueError(
            f"'{name}' has both biases and norms on q and k; Qwen2 has biases, Qwen3 has norms"
        )
    usual = {"score": "softmax", "num_shared": 0, "bias_rate": None, "scale": 1, "num_groups": 1}
    usual["weighs"] = "result"
    usual |= {"renormalise": True} if model_type == "mixtral" else {}
    if experts and (model["qkv_bias"] or any(experts[x] != value for x, value in usual.items())):
        use = "those use a softmax over experts, all of one group, and Mixtral's chosen weights add up to one"
        raise ValueError(f"'{name}' routes as neither Mixtral nor Qwen3-MoE does; {use}")
    raw = {
        "architectures": [f"{model_type.title().replace('_', '')}ForCausalLM"],
        "model_type": model_type,
        "hidden_act": "silu",
        "intermediate_size": model["ffn_width"],
        **_theirs(MODEL, model),
    }
    if model["window"]:  # Qwen's layers from max_window_layers on have it
        raw |= {
            "sliding_window": model["window"],
            "use_sliding_window": True,
            "max_window_layers": 0,
        }
    if experts:
        raw |= {"moe_intermediate_size": model["ffn_width"], **_theirs(EXPERTS, experts)}
        raw |= {"decoder_sparse_step": 1, "mlp_only_layers": []}  # MLX needs them
    if model["rope_scaling"]:
        raw["rope_scaling"] = {"rope_type": "llama3", **_theirs(ROPE, model["rope_scaling"])}
    return raw


def _theirs(names: dict[str, str], ours: dict[str, Any]) -> dict[str, Any]:
    return {theirs: ours[name] for theirs, name in names.items() if ours[name] is not None}
