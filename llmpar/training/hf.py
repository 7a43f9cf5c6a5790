"""Weights of Llama, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE as Hugging Face stores them: safetensors in
and out.

They keep one tensor per layer and expert, and a projection as [out, in] with its heads merged; we stack
layers and experts and keep heads apart. `NAMES` says theirs in our letters: ``(n h) d`` has one dim made of
heads times head width. A load reads only a device's own rows and columns out of the memory-mapped files, so
no host holds the whole model. (Only a shard cut along ``h`` is read with its whole heads and cut afterwards.)
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from llmpar.config import ModelConfig, to_hugging_face
from llmpar.files import check_ordinary, read_json, refuse
from llmpar.hugging_face import family
from llmpar.training.data import FileTokenizer, Tokenizer
from llmpar.weights import Tree

FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
"""Kinds of numbers that are read, as numpy and as safetensors call them. Quantized weights are refused."""

NAMES = {
    "embedding": ("model.embed_tokens.weight", "v d"),
    "norm.scale": ("model.norm.weight", "d"),
    "head": ("lm_head.weight", "v d"),
    "blocks.attention_norm.scale": ("model.layers.{}.input_layernorm.weight", "d"),
    "blocks.attention.q": ("model.layers.{}.self_attn.q_proj.weight", "(n h) d"),
    "blocks.attention.k": ("model.layers.{}.self_attn.k_proj.weight", "(k h) d"),
    "blocks.attention.v": ("model.layers.{}.self_attn.v_proj.weight", "(k h) d"),
    "blocks.attention.o": ("model.layers.{}.self_attn.o_proj.weight", "d (n h)"),
    "blocks.attention.q_bias": ("model.layers.{}.self_attn.q_proj.bias", "(n h)"),
    "blocks.attention.k_bias": ("model.layers.{}.self_attn.k_proj.bias", "(k h)"),
    "blocks.attention.v_bias": ("model.layers.{}.self_attn.v_proj.bias", "(k h)"),
    "blocks.attention.q_norm.scale": ("model.layers.{}.self_attn.q_norm.weight", "h"),
    "blocks.attention.k_norm.scale": ("model.layers.{}.self_attn.k_norm.weight", "h"),
    "blocks.ffn_norm.scale": ("model.layers.{}.post_attention_layernorm.weight", "d"),
    "blocks.ffn.gate": ("model.layers.{}.mlp.gate_proj.weight", "m d"),
    "blocks.ffn.up": ("model.layers.{}.mlp.up_proj.weight", "m d"),
    "blocks.ffn.down": ("model.layers.{}.mlp.down_proj.weight", "d m"),
    "blocks.experts.router": ("model.layers.{}.mlp.gate.weight", "e d"),
    "blocks.experts.bias": ("model.layers.{}.mlp.gate.e_score_correction_bias", "e"),
    "blocks.experts.gate": ("model.layers.{}.mlp.experts.{}.gate_proj.weight", "m d"),
    "blocks.experts.up": ("model.layers.{}.mlp.experts.{}.up_proj.weight", "m d"),
    "blocks.experts.down": ("model.layers.{}.mlp.experts.{}.down_proj.weight", "d m"),
    "blocks.experts.shared.gate": ("model.layers.{}.mlp.shared_experts.gate_proj.weight", "m d"),
    "blocks.experts.shared.up": ("model.layers.{}.mlp.shared_experts.up_proj.weight", "m d"),
    "blocks.experts.shared.down": ("model.layers.{}.mlp.shared_experts.down_proj.weight", "d m"),
}
"""Path of each weight here to its name (``{}`` is the layer, then the expert) and dims there."""
MIXTRAL = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""What Mixtral calls otherwise."""


class _Weight:
    """One of our weights, and the tensors that it is made of."""

    def __init__(self, path: str, dims: str, shape: tuple[int, ...], other_words: dict[str, str]):
        self.name, theirs = NAMES[path]
        for ours, other in other_words.items():
            self.name = self.name.replace(ours, other)
        self.letters, self.shape = dims.split()[1:], shape
        self.sizes = dict(zip(self.letters, shape, strict=True))
        self.groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w", theirs)]
        num_stacked = self.name.count("{}")  # dims with a tensor for each index: layers, experts
        self.stacked, self.own = self.letters[:num_stacked], self.letters[num_stacked:]
        self.names = self.named({x: slice(self.sizes[x]) for x in self.stacked})
        self.their_shape = tuple(math.prod(self.sizes[x] for x in group) for group in self.groups)

    def named(self, cut: dict[str, slice]) -> list[str]:
        """The names of the tensors of a block."""
        indices = (range(self.sizes[x])[cut[x]] for x in self.stacked)
        return [self.name.format(*numbers) for numbers in itertools.product(*indices)]

    def read(self, tensors: Mapping, index: Sequence[slice], dtype: np.dtype) -> np.ndarray:
        """The block of this weight that ``index`` cuts out, stacked over its layers and experts."""
        cut = {x: slice(*s.indices(self.sizes[x])) for x, s in zip(self.letters, index, strict=True)}
        region, parts, inner, letters = [], [], [], [x for group in self.groups for x in group]
        for first, *rest in self.groups:
            width = math.prod(self.sizes[x] for x in rest)
            region.append(slice(cut[first].start * width, cut[first].stop * width))
            parts += [cut[first].stop - cut[first].start, *(self.sizes[x] for x in rest)]
            inner += [slice(None), *(cut[x] for x in rest)]
        out = np.empty([cut[x].stop - cut[x].start for x in self.letters], dtype)
        layers = out.reshape(-1, *(cut[x].stop - cut[x].start for x in self.own))
        for layer, name in zip(layers, self.named(cut), strict=True):
            piece = tensors[name][tuple(region)].reshape(parts)[tuple(inner)]
            layer[...] = piece.transpose([letters.index(x) for x in self.own])
        return out

    def write(self, value: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of this weight. Contiguous copies: safetensors 0.8 writes transposed views in the wrong
        order."""
        layers = value.reshape(-1, *(self.sizes[x] for x in self.own))
        order = [self.own.index(x) for group in self.groups for x in group]
        tensors = (np.ascontiguousarray(layer.transpose(order).reshape(self.their_shape)) for layer in layers)
        return dict(zip(self.names, tensors, strict=True))

    def place(self, tensors: Mapping, sharding: jax.sharding.Sharding, dtype: np.dtype) -> jax.Array:
        """This weight on its devices; a block that several devices of this host share is read once."""
        read = functools.cache(lambda *bounds: self.read(tensors, [slice(*b) for b in bounds], dtype))
        block = lambda index: read(*((s.start, s.stop) for s in index))
        return jax.make_array_from_callback(self.shape, sharding, block)


def _weights(config: ModelConfig) -> dict[str, _Weight]:
    words = MIXTRAL if family(dataclasses.asdict(config)) == "mixtral" else {}
    base = dataclasses.replace(config, lora=None)
    return {path: _Weight(path, w.dims, w.shape, words) for path, w in base.weights().items()}


def from_state_dict(
    tensors: Mapping[str, Any], config: ModelConfig, shardings: Tree = None, dtype: str = "float32"
) -> Tree:
    """Parameters from tensors by Hugging Face name, each put straight onto its sharding (default: the first
    device).

    A tensor is an array, or a slice of a safetensors file. Missing, unexpected, misshapen and quantized ones
    are refused by name. Two redundant ones are left out: ``rotary_emb.inv_freq`` of old files (computed
    here), and a tied model's output head (if it equals the embedding).
    """
    weights = _weights(config)
    expected = {name: weight.their_shape for weight in weights.values() for name in weight.names}
    extra = {name for name in tensors.keys() - expected.keys() if not name.endswith(".rotary_emb.inv_freq")}
    if config.tied and {"lm_head.weight"} == extra and NAMES["embedding"][0] in tensors:
        head, table = tensors["lm_head.weight"], tensors[NAMES["embedding"][0]]
        if _describe(head) == _describe(table) and np.array_equal(head[:], table[:]):
            extra.clear()
    faults = [f"'{name}' is missing" for name in expected.keys() - tensors.keys()]
    faults += [f"'{name}' has no place in it" for name in extra]
    for name in expected.keys() & tensors.keys():
        shape, kind = _describe(tensors[name])
        if shape != expected[name]:
            faults.append(f"'{name}' has shape {list(shape)}, not {list(expected[name])}")
        elif kind not in FLOATS:
            faults.append(f"'{name}' holds {kind}, but only {', '.join(FLOATS[:4])} are read")
    if faults:
        found = "; ".join(sorted(faults)[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        what = f"these tensors are not the model '{config.name}': {found}"
        raise ValueError(f"{what}; use the config.json that they came with")
    only = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = dict.fromkeys(weights, only) if shardings is None else flatten_dict(shardings, sep=".")
    params = {path: weight.place(tensors, where[path], np.dtype(dtype)) for path, weight in weights.items()}
    return unflatten_dict(params, sep=".")


def _describe(tensor) -> tuple[tuple[int, ...], str]:
    """Shape and kind of number of an array, or of a slice of a file."""
    if hasattr(tensor, "get_shape"):
        return tuple(tensor.get_shape()), tensor.get_dtype()
    return tuple(tensor.shape), str(tensor.dtype)


def to_state_dict(params: Tree, config: ModelConfig, dtype: str = "float32") -> dict[str, np.ndarray]:
    """All tensors by Hugging Face name, whole, in the memory of this process, which must be able to read
    ``params``."""
    flat = flatten_dict(params, sep=".")
    pieces = [weight.write(np.asarray(flat[path]).astype(dtype)) for path, weight in _weights(config).items()]
    return {name: tensor for piece in pieces for name, tensor in piece.items()}


def load(
    folder: str | os.PathLike, config: ModelConfig, shardings: Tree = None, dtype: str = "float32"
) -> Tree:
    """Parameters from a folder: its ``model.safetensors``, or the shards that its index.json names.

    Reads what the devices of this process need and no more; the shards of one weight at a time are in host
    memory.
    """
    safetensors, tensors = _safetensors(), dict[str, Any]()
    for file in _files(pathlib.Path(folder)):
        check_ordinary(file, "file of weights")
        try:
            opened = safetensors.safe_open(file, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"cannot read weights from '{file}': {error}; fetch that file again") from error
        for name in opened.keys():
            if name in tensors:
                raise ValueError(f"tensor '{name}' is in '{file}' and in a file before it; give it once")
            tensors[name] = opened.get_slice(name)
    return from_state_dict(tensors, config, shardings, dtype)


def _safetensors():
    try:
        import safetensors.numpy
    except ImportError as error:
        needs = "Hugging Face weights need the package safetensors"
        raise ValueError(f"{needs}; install the extra llmpar[hf]") from error
    return safetensors


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a folder."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ValueError(f"'{folder}' has neither {whole.name} nor {index.name}; give a folder with weights")
    weight_map = read_json(index, "index of weights").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        refuse(index, "index of weights", "its weight_map names no files; fetch that file again")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if name != pathlib.PurePath(name).name]:
        refuse(index, "index of weights", f"it names '{outside[0]}', which is no file of that folder")
    return [folder / name for name in names]


BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
"""What comes with a tokenizer.json and is copied with it."""


def save(
    folder: str | os.PathLike,
    params: Tree,
    config: ModelConfig,
    dtype: str = "float32",
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write ``model.safetensors`` and ``config.json``; each appears under its name when it is complete.

    Args:
        tokenizer: what the model was trained with. Its ``tokenizer.json`` is copied with the files that lie
            beside it, and config.json and generation_config.json name the tokens that begin a text and end
            it.
    """
    path, safetensors = pathlib.Path(folder), _safetensors()
    path.mkdir(parents=True, exist_ok=True)
    about = to_hugging_face(config) | {"torch_dtype": dtype}
    tensors = to_state_dict(params, config, dtype)
    safetensors.numpy.save_file(tensors, path / "model.part", metadata={"format": "pt"})
    os.replace(path / "model.part", path / "model.safetensors")
    if tokenizer is not None:
        about |= _save_tokenizer(path, tokenizer)
    _put(path / "config.json", about)


def _save_tokenizer(path: pathlib.Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write what belongs to a tokenizer, and give the tokens that begin a text and end it. (Bytes have no
    file there, and no token that ends a text.)"""
    ids: dict[str, Any] = {"bos_token_id": tokenizer.start_id}
    if isinstance(tokenizer, FileTokenizer):
        file = pathlib.Path(tokenizer.file)
        sources = {"tokenizer.json": file} | {name: file.with_name(name) for name in BESIDE}
        for name, source in sources.items():
            if source.is_file() and source.parent.resolve() != path.resolve():
                shutil.copyfile(source, path / name)
        for name in ("config.json", "generation_config.json"):  # the second has the last word
            if (there := file.with_name(name)).is_file():
                ids |= {k: v for k, v in read_json(there, "configuration").items() if k == "eos_token_id"}
    if not (path / "generation_config.json").exists():
        _put(path / "generation_config.json", ids)
    return ids


def _put(path: pathlib.Path, entries: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(entries, indent=2) + "\n")
    os.replace(part, path)
