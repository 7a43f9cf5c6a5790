"""Models by name: the presets, and what a ``config.json`` of Hugging Face describes."""

import dataclasses
import difflib
import json
import os
import pathlib
import re
from collections import UserDict
from collections.abc import Mapping, Sequence
from typing import Any

from llmpar.files import allowed, read_json, read_toml, refuse
from llmpar.plan import config_json as hugging_face
from llmpar.plan import families
from llmpar.plan.model_config import LLAMA, ExpertConfig, LoraConfig, ModelConfig, from_dict
from llmpar.plan.running import MEDIA, NotImplementedHere


def preset(name: str) -> ModelConfig:
    """A preset by name, or a Hugging Face ``config.json`` by its path, by its folder's, or by the name of a
    model that this machine has downloaded (``meta-llama/Llama-3.1-8B``); any with other dims behind it,
    ``llama3-8b width=5120 num_layers=40``, or with adapters, ``llama3-8b lora_rank=16``."""
    if not isinstance(name, str):
        raise ValueError(
            f"a model is named by text, and this is {name!r:.60}; use one of {', '.join(PRESETS)}"
        )
    base, *dims = name.split() or [""]
    if dims and all("=" in dim for dim in dims):
        return with_dims(preset(base), dims)
    if name not in PRESETS and os.path.isdir(folder := folder_of(name)):
        config = from_hugging_face(os.path.join(folder, "config.json"))
        return (
            config if folder == name else dataclasses.replace(config, name=name.partition("/")[2])
        )
    if name.endswith(".json"):
        return from_hugging_face(name)
    if name not in PRESETS:
        near = " or ".join(near_presets(name))
        raise ValueError(
            f"unknown model {name!r:.80}; {f'did you mean {near}? ' if near else ''}'llmpar models' lists"
            f" {len(PRESETS)} presets, or give the path of a config.json, or the name of a downloaded model"
        )
    return PRESETS[name]


DIMS: tuple[str, ...] = (
    "vocab_size",
    "width",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_width",
    "ffn_width",
    "tied",
    "window",
    "num_experts",
    "top_k",
    "num_shared",
)
"""What may be written behind a model's name; the last three are its experts'."""
ADAPTER_DIMS = "lora_rank", "lora_alpha", "lora_targets"
"""And behind any model's: `LoraConfig`'s fields, the targets joined by commas."""


def with_dims(config: ModelConfig, dims: Sequence[str]) -> ModelConfig:
    """Return a model with other dims, each as ``name=number``; its name has them too.

    >>> with_dims(preset("tiny"), ["num_layers=6"]).num_params - preset("tiny").num_params
    73984
    >>> with_dims(preset("tiny"), ["lora_rank=4", "lora_targets=q,v"]).lora
    LoraConfig(rank=4, alpha=16.0, targets=('q', 'v'))
    """
    if config.described and not all(dim.startswith("lora_") for dim in dims):
        raise ValueError(
            f"'{config.name}' has layers of its own kinds; give a config.json that has these dims, not"
            f" {' '.join(dims)}"
        )
    given = dict[str, Any]()
    for dim in dims:
        name, _, text = dim.partition("=")
        value = {"true": True, "false": False, "none": None}.get(text, text)
        if name in given:
            raise ValueError(f"'{name}' is given twice")
        is_rate = re.fullmatch(r"\d+(\.\d+)?(e[+-]?\d+)?", text)
        given[name] = int(text) if text.isdecimal() else float(text) if is_rate else value
    known = *DIMS, *ADAPTER_DIMS
    if unknown := [dim for dim in dims if dim.partition("=")[0] not in known]:
        raise ValueError(f"'{unknown[0]}' is no dim of a model; its dims are {', '.join(known)}")
    if adapters := {x.partition("_")[2]: given.pop(x) for x in ADAPTER_DIMS if x in given}:
        if "rank" not in adapters:
            raise ValueError(
                f"{' '.join(dims)} shape adapters, and there are none; give lora_rank too"
            )
        if targets := adapters.get("targets"):
            adapters["targets"] = tuple(str(targets).split(","))
        given["lora"] = LoraConfig(**adapters)
    if experts := {name: given.pop(name) for name in DIMS[-3:] if name in given}:
        usual = dataclasses.asdict(config.experts) if config.experts else {}
        if missing := {"num_experts", "top_k"} - {*usual, *experts}:
            raise ValueError(f"'{config.name}' has no experts; give {missing.pop()} too")
        given["experts"] = ExpertConfig(**usual | experts)
    return dataclasses.replace(config, name=" ".join((config.name, *dims)), **given)


def near_presets(name: str) -> list[str]:
    """Presets that are spelled nearly like a name, the nearest first; at most three."""
    return difflib.get_close_matches(name[:80].rpartition("/")[2].lower(), PRESETS, 3, 0.7)


def folder_of(name: str) -> str:
    """The folder of a model that this machine has downloaded, by its name; another name is a folder's own."""
    if os.path.isdir(name) or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return name
    hub = pathlib.Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    kept = (hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json")
    newest = max(kept, key=os.path.getmtime, default=None)
    return str(newest.parent) if newest else name


def from_hugging_face(path: str) -> ModelConfig:
    """Read a ``config.json`` of a family that `families` describes. Refuse, by key, what it does not know."""
    raw = families.text_part(read_json(path, "model configuration"))
    model_type = raw.get("model_type")
    if not families.is_planned(model_type):
        others = len(families.FAMILIES) - len(families.RUNNING)
        raise ValueError(
            f"model_type '{str(model_type):.60}' in '{path}' is not one of"
            f" {', '.join(families.RUNNING)}, nor of {others} others that are planned"
        )
    name = pathlib.Path(path).parent.name or str(model_type)
    try:
        if model_type in hugging_face.FAMILIES:
            hugging_face.check_entries(raw, allowed(ModelConfig) | allowed(ExpertConfig))
            return _of_own_fields(name, raw)
        return described_model(name, raw)
    except ValueError as reason:
        refuse(path, "model configuration", str(reason))


def _of_own_fields(name: str, raw: dict[str, Any]) -> ModelConfig:
    """Return the model of a ``config.json``'s entries without rows, where its own fields say all of them."""
    try:
        fields = families.read_family(raw, name, runs=True)
    except NotImplementedHere:
        return described_model(name, raw)
    described, rows = from_dict(fields), dict(fields["described"]["rows"])
    more = {"qk_norm": "attention.q_norm.scale" in rows, "qkv_bias": "attention.q_bias" in rows}
    own = from_dict(fields | more | {"described": None})
    written = own.rope_scaling is None or own.rope_scaling.kind == "llama3"
    plain = written and own.variant == LLAMA and not own.kinds
    plain = plain and not fields["described"]["further"]
    return own if plain and own.weights() == described.weights() else described


def described_model(name: str, raw: dict[str, Any]) -> ModelConfig:
    """Return the model of a ``config.json``'s entries: one that runs, or one that is planned, because of what
    running it would need."""
    why = f"layers of model_type '{raw['model_type']}' are counted but not implemented"
    if raw["model_type"] in families.RUNNING:
        try:
            return from_dict(families.read_family(raw, name, runs=True))
        except ValueError as reason:
            why = str(reason)
    return from_dict(families.read_family(raw, name, why))


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` that `from_hugging_face` and `transformers` read as this model."""
    config.must_run()
    if config.lora:
        raise ValueError(
            f"'{config.name}' has adapters, which a config.json cannot say; merge them first"
        )
    if config.described is None:
        return hugging_face.write_config(dataclasses.asdict(config))
    raw = json.loads(config.described.file)
    if described_model(config.name, raw) != config:
        raise ValueError(
            f"'{config.name}' is no longer what its config.json says; export a model as it was read"
        )
    left_out = "quantization_config", "text_part_of", *MEDIA
    return {key: value for key, value in raw.items() if key not in left_out}


_HERE = pathlib.Path(__file__)
_TABLE = read_toml(_HERE.with_name("presets.toml"), "table of presets")


def maker_of(name: str) -> str:
    """Return who made a preset; for the small ones of lessons, "for lessons"."""
    makers = _TABLE["makers"]
    return next((makers[start] for start in makers if name.startswith(start)), "for lessons")


class _Presets(UserDict[str, Any]):
    """Models by name. One is made of its row when it is first asked for: many rows take a moment."""

    def __getitem__(self, name: str) -> ModelConfig:
        if isinstance(row := self.data[name], dict):
            self.data[name] = _preset(name, row) if "sizes" in row else described_model(name, row)
        return self.data[name]


def _preset(name: str, row: dict[str, Any]) -> ModelConfig:
    names = ("vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "ffn_width")
    sizes = dict(zip(names, row["sizes"], strict=True))
    head_width = {"head_width": sizes["width"] // sizes["num_heads"]}
    family = _TABLE["families"].get(row.get("family"), {})
    own = {key: value for key, value in row.items() if key not in ("sizes", "family")}
    return from_dict({"name": name} | head_width | sizes | family | own)


_MAKERS = ["for lessons", *_TABLE["makers"].values()]
_ROWS = _TABLE["models"] | read_toml(_HERE.with_name("described.toml"), "table of described models")
PRESETS: Mapping[str, ModelConfig] = _Presets(
    {name: _ROWS[name] for name in sorted(_ROWS, key=lambda name: _MAKERS.index(maker_of(name)))}
)
"""Public models by name, and the small ones of the lessons."""
