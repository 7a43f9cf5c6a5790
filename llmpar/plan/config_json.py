"""The ``config.json`` of Hugging Face models in our words, and ours in theirs: plain data on both sides, as
`dataclasses.asdict` gives a :class:`llmpar.plan.model_config.ModelConfig`."""

import pathlib
from typing import Any

from llmpar.files import Allowed, read_json, read_toml
from llmpar.plan.running import NotImplementedHere

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
TABLES = read_toml(pathlib.Path(__file__).with_suffix(".toml"), "table of names")
MODEL, ROPE, EXPERTS = (TABLES[part] for part in ("model", "rope", "experts"))
"""What they call our fields: a model's, its stretched rotary frequencies', its experts'."""
_OURS = MODEL | ROPE | EXPERTS | TABLES["others"]
UNSAID = dict.fromkeys(TABLES["null"]) | TABLES["unsaid"]
"""What an entry that a file leaves out means to `transformers`. Those of None may be null."""
THEIR_OWN = {
    "model_type": Allowed(str), "hidden_act": Allowed(str), "rope_scaling": Allowed(dict, none=True),
    "rope_parameters": Allowed(dict, none=True), "rope_type": Allowed(str), "type": Allowed(str),
    "partial_rotary_factor": Allowed(float, 0, 1, none=True),
    "quantization_config": Allowed(dict, none=True), "use_sliding_window": Allowed(bool),
    "max_window_layers": Allowed(int, 0), "layer_types": Allowed(list, none=True),
    "decoder_sparse_step": Allowed(int, 1, 1 << 24), "mlp_only_layers": Allowed(list, none=True),
}  # fmt: skip
"""What fields that only they have may be."""


class _Card(dict):
    """Entries of a ``config.json``, refused by name where one is missing or not what it may be."""

    def __init__(self, entries: dict, path: str, allowed: dict[str, Allowed]):
        super().__init__(entries)
        self.path, self.allowed = path, allowed

    def __getitem__(self, key: str):
        if key not in self:
            raise ValueError(f"'{self.path}' lacks '{key}', which its model_type needs")
        allowed = THEIR_OWN[key] if key in THEIR_OWN else self.allowed[_OURS[key]]
        value, may_be_null = (
            super().__getitem__(key),
            allowed.none or UNSAID.get(key, "needed") is None,
        )
        allowed._replace(none=may_be_null).check(f"{key} in '{self.path}'", value)
        return value

    def get(self, key: str, default=None):
        """Return the entry, or the default where the file has none."""
        return self[key] if key in self else default

    def ours(self, names: dict[str, str]) -> dict[str, Any]:
        """The entries with these ``names``, in our words."""
        return {
            ours: UNSAID[theirs] if theirs in UNSAID and theirs not in self else self[theirs]
            for theirs, ours in names.items()
        }


def read_config(entries: dict, path: str, allowed: dict[str, Allowed]) -> dict[str, Any]:
    """Read the entries of a ``config.json``; refuse, by its key, what the model cannot do or our fields may
    not be."""
    raw = _Card(entries, path, allowed)
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise NotImplementedHere(
            f"model_type '{str(model_type):.60}' in '{path}' is not one of {', '.join(FAMILIES)}"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise NotImplementedHere(
            f"hidden_act '{raw['hidden_act']}' in '{path}' is not implemented; silu is"
        )
    if raw.get("mlp_bias") or (model_type != "qwen2" and raw.get("attention_bias")):
        raise NotImplementedHere(
            f"'{path}' asks for biases in the feed-forward or the output projection, which are not"
            " implemented"
        )
    if raw.get("quantization_config") is not None:
        raise NotImplementedHere(
            f"'{path}' is of quantized weights (quantization_config), which are not read; use the"
            " original model"
        )
    rope = _Card(raw.get("rope_parameters") or raw.get("rope_scaling") or {}, path, allowed)
    if any(x.get("partial_rotary_factor", 1) not in (1, None) for x in (raw, rope)):
        raise NotImplementedHere(
            f"partial_rotary_factor in '{path}' is not 1, the only one that is implemented"
        )
    experts = None
    if model_type in ("mixtral", "qwen3_moe"):
        experts = raw.ours(EXPERTS) | {
            "num_experts": raw.get("num_experts") or raw["num_local_experts"]
        }
        experts["renormalise"] |= model_type == "mixtral"
    if model_type == "qwen3_moe" and (
        raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers")
    ):
        raise NotImplementedHere(
            f"'{path}' has layers without experts (decoder_sparse_step, mlp_only_layers); use experts in all"
        )
    model = raw.ours(MODEL)
    width, heads, head_width = model["width"], model["num_heads"], model["head_width"]
    if head_width is None and width % heads:
        raise ValueError(
            f"hidden_size {width} in '{path}' is no multiple of its {heads} heads, and no head_dim is given"
        )
    return model | {
        "name": pathlib.Path(path).parent.name or model_type,
        "num_kv_heads": model["num_kv_heads"] or heads,
        "head_width": head_width or width // heads,
        "ffn_width": raw[
            "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
        ],
        "rope_theta": rope.get("rope_theta") or model["rope_theta"],
        "rope_scaling": _scaling(rope, path),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type.startswith("qwen3"),
        "window": _window(raw, model_type, path),
        "experts": experts,
    }


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


def _scaling(rope: _Card, path: str) -> dict | None:
    rope_type = rope.get("rope_type") or rope.get("type", "default")
    if rope_type not in ("default", "llama3"):
        raise NotImplementedHere(
            f"rope type '{rope_type}' in '{path}' is not implemented; default and llama3 are"
        )
    return rope.ours(ROPE) if rope_type == "llama3" else None


def _window(raw: dict, model_type: str, path: str) -> int | None:
    """The window of all layers. Qwen's have one from max_window_layers (28 where unsaid) on."""
    if model_type in ("mistral", "mixtral"):
        return raw.get("sliding_window")
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    if not window:
        return None
    sliding = [t == "sliding_attention" for t in raw.get("layer_types") or []]
    first = raw.get("max_window_layers", 28)
    sliding = sliding or [i >= first for i in range(raw["num_hidden_layers"])]
    if any(sliding) and not all(sliding):
        windows = f"a window in {sum(sliding)} of {len(sliding)} layers"
        raise NotImplementedHere(f"'{path}' has {windows}; use one in all or none")
    return window if any(sliding) else None


def family(model: dict[str, Any]) -> str:
    """Return the model_type of Hugging Face."""
    if model["experts"]:
        return "qwen3_moe" if model["qk_norm"] else "mixtral"
    if model["qkv_bias"]:
        return "qwen2"
    return "qwen3" if model["qk_norm"] else "mistral" if model["window"] else "llama"


def write_config(model: dict[str, Any]) -> dict[str, Any]:
    """What `read_config` and `transformers` read as this model. Refuses what they have no name for."""
    model_type, experts, name = family(model), model["experts"], model["name"]
    if model["qkv_bias"] and model["qk_norm"]:
        raise ValueError(
            f"'{name}' has both biases and norms on q and k; Qwen2 has biases, Qwen3 has norms"
        )
    usual = {"score": "softmax", "num_shared": 0, "bias_rate": None, "scale": 1, "num_groups": 1}
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
