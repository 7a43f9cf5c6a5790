"""Weights of the families that run as Hugging Face stores them: safetensors in and out.

They keep one tensor per layer and expert, and a projection as [out, in] with its heads merged; we stack
layers and experts and keep heads apart. `TENSOR_NAMES` has theirs in our letters: ``(n h) d`` has one dim
made of heads times head width. A load reads only a device's own rows and columns out of the memory-mapped
files, one tensor after the other, so no host holds more of the model than its devices do. (Only a shard cut
along ``h`` is read with its whole heads and cut afterwards.)
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from jax.experimental.multihost_utils import process_allgather

from llmpar.files import check_ordinary, read_json, refuse
from llmpar.model.weights import Tree
from llmpar.parallel.mesh import axes_of
from llmpar.plan import families
from llmpar.plan.config_json import TABLES, family
from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import ModelConfig, Weight, kind_of
from llmpar.plan.presets import to_hugging_face
from llmpar.training.quantized import expanded, float8_tensors
from llmpar.training.tokenizers import FileTokenizer, Tokenizer

# Kinds of numbers that are read, as numpy and as safetensors call them; `quantized` makes them of others.
FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
# Kinds that are written: safetensors' name, and bytes. (Large weights would be infinite in float16.)
_KINDS = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}
# What a file of weights has at most, unless it has one tensor: as `transformers` cuts them.
SHARD_BYTES = 5 * 10**9
INDEX = "model.safetensors.index.json"

# Path of each weight here to its name there (``{}`` is the layer, then the expert); `families.toml` has what
# families call otherwise.
TENSOR_NAMES = TABLES["weights"]
LEFT_OUT = "mtp.", "model.visual."  # how names begin of tensors that are not read


class _Weight:
    """One of our weights, and the tensors that it is made of, or is a part of.

    They keep a matrix as [out, in] with its heads merged, a vector with its dims merged; or, where a family's
    table says so, as we do. Of weights that share a tensor each has a block of it, or every so many-th row.
    """

    def __init__(self, name: str, weight: Weight, layers: Sequence[int], order: str | None):
        region, *self.letters = weight.dims.split()
        self.name, self.shape = name, weight.shape
        self.sizes = dict(zip(self.letters, self.shape, strict=True))
        num_stacked = name.count("{}")  # dims with a tensor for each index: layers, experts
        self.stacked, self.own = self.letters[:num_stacked], self.letters[num_stacked:]
        self.numbers = list(itertools.product(*(range(self.sizes[x]) for x in self.stacked)))
        places = [(*(layers[n] for n in numbers[:1]), *numbers[1:]) for numbers in self.numbers]
        self.names = [name.format(*numbers) for numbers in places]
        if order is not None or region == "vocab":
            self.groups = [[*dims] for dims in (order or " ".join(self.own)).split()]
        elif weight.is_vector:
            self.groups = [self.own]
        else:
            cut = len(self.own) - 1 if self.own[-1] == "d" else 1
            self.groups = [self.own[cut:], self.own[:cut]]
        self.own_shape = tuple(math.prod(self.sizes[x] for x in group) for group in self.groups)
        self.share((self,), 0, 1)

    def share(self, parts: Sequence[_Weight], place: int, num_groups: int) -> None:
        """Be one of the ``parts`` of each tensor, side by side along the dim of heads or of hidden units, in
        each of ``num_groups`` groups of rows; 0: in groups of a row of each."""
        axes = [i for i, group in enumerate(self.groups) if {"n", "k", "m"} & {*group}]
        self.axis = axes[0] if axes else 0
        sizes = [part.own_shape[self.axis] for part in parts] if self.own_shape else [1]
        num_groups = num_groups or sizes[place]
        self.rows, self.begin = sizes[place] // num_groups, sum(sizes[:place]) // num_groups
        self.group_rows = sum(sizes) // num_groups  # of a group, in the tensor
        whole = list(self.own_shape)
        if len(parts) > 1:
            whole[self.axis] = sum(sizes)
        self.their_shape = tuple(whole)

    def read(self, tensor: Any, dtype: np.dtype, *bounds: tuple[int, int]) -> np.ndarray:
        """Return the block within these ``bounds`` of one tensor's dims, which are in our order. Of rows in
        several groups all rows of these groups are read."""
        cut = {x: slice(*s) for x, s in zip(self.own, bounds, strict=True)}
        region, parts, inner, letters = [], [], [], [x for group in self.groups for x in group]
        for first, *rest in self.groups:
            width = math.prod(self.sizes[x] for x in rest)
            region.append((cut[first].start * width, cut[first].stop * width))
            parts += [cut[first].stop - cut[first].start, *(self.sizes[x] for x in rest)]
            inner += [slice(None), *(cut[x] for x in rest)]
        if self.group_rows == self.rows:
            piece = tensor[tuple(slice(*ends) for ends in region)]
        else:
            piece = self._read_groups(tensor, region)
        piece = piece.reshape(parts)[tuple(inner)]
        return piece.transpose([letters.index(x) for x in self.own]).astype(dtype, order="C")

    def _read_groups(self, tensor: Any, region: list[tuple[int, int]]) -> np.ndarray:
        """Return a region of this weight's own rows and columns from a tensor that it shares."""
        at, (start, stop) = self.axis, region[self.axis]
        first, last = start // self.rows, (stop - 1) // self.rows
        shift = first * (self.group_rows - self.rows) + self.begin
        of_groups = first * self.group_rows, (last + 1) * self.group_rows
        rows = (start + shift, stop + shift) if first == last else of_groups
        piece = tensor[tuple(slice(*ends) for ends in [*region[:at], rows, *region[at + 1 :]])]
        if first == last:
            return piece
        groups = np.moveaxis(piece, at, 0)
        groups = groups.reshape(-1, self.group_rows, *groups.shape[1:])
        own = groups[:, self.begin : self.begin + self.rows].reshape(-1, *groups.shape[2:])
        return np.moveaxis(own[start - first * self.rows :][: stop - start], 0, at)

    def place(
        self, tensors: Mapping, sharding: jax.sharding.Sharding, dtype: np.dtype
    ) -> jax.Array:
        """Put this weight on its devices. One tensor at a time is in this host's memory; a block of it that
        several devices of this host share is read once."""
        num, cuts, shards = len(self.stacked), {}, {}
        for device, index in sharding.addressable_devices_indices_map(self.shape).items():
            cuts[device] = [s.indices(n)[:2] for s, n in zip(index or (), self.shape, strict=True)]
            shards[device] = jnp.zeros(
                [end - start for start, end in cuts[device]], dtype, device=device
            )
        for numbers, name in zip(self.numbers, self.names, strict=True):
            read = functools.cache(functools.partial(self.read, tensors[name], dtype))
            for device, cut in cuts.items():
                at = [n - cut[i][0] for i, n in enumerate(numbers)]
                if all(cut[i][0] <= n < cut[i][1] for i, n in enumerate(numbers)):
                    piece = jax.device_put(read(*cut[num:]), device)
                    shards[device] = _put(shards[device], piece, at)
            jax.block_until_ready(list(shards.values()))
        return jax.make_array_from_single_device_arrays(self.shape, sharding, list(shards.values()))

    def write(self, value: Any, dtype: str) -> Iterator[np.ndarray]:
        """Yield this weight's own part of each tensor; every process must take all of them."""
        if np.shape(value) != self.shape:
            raise ValueError(
                f"'{self.name}' is made of {list(self.shape)}, not of {list(np.shape(value))}; give layers"
                " in the model's order (Step.to_model_order)"
            )
        order = [self.own.index(x) for group in self.groups for x in group]
        for numbers in self.numbers:
            own = _take(value, numbers).astype(dtype).transpose(order)
            yield np.ascontiguousarray(own.reshape(self.own_shape))


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, piece: jax.Array, at: list) -> jax.Array:
    """Write ``piece`` into the stack at the place ``at``, in the same memory."""
    piece = piece.reshape((1,) * len(at) + piece.shape)
    return lax.dynamic_update_slice(stack, piece, [*at, *(0 for _ in piece.shape[len(at) :])])


def _take(stack: Any, at: tuple[int, ...]) -> np.ndarray:
    """Return one tensor of a stack, whole, in every process."""
    if not isinstance(stack, jax.Array) or not isinstance(
        stack.sharding, jax.sharding.NamedSharding
    ):
        return np.asarray(stack[at])
    bits = _take_bits(stack, at, stack.sharding)
    whole = np.asarray(bits if bits.is_fully_addressable else process_allgather(bits, tiled=True))
    return whole.astype(f"uint{8 * stack.dtype.itemsize}").view(stack.dtype)


@functools.partial(jax.jit, static_argnums=2)
def _take_bits(stack: jax.Array, at: tuple, sharding: jax.sharding.NamedSharding) -> jax.Array:
    """Return the bits of one tensor of a stack; its own dims are cut as before. (Of a stack that is cut along
    its layers or experts XLA would gather all.)"""
    cuts = [*sharding.spec, *[None] * (stack.ndim - len(sharding.spec))]
    axes, own = (
        [axes_of(cut) for cut in cuts[: len(at)]],
        jax.sharding.PartitionSpec(*cuts[len(at) :]),
    )

    def take(stack, at):
        is_local = jnp.bool_(True)
        for n, names in zip(at, axes, strict=True):
            n -= lax.axis_index(names) * len(stack) if names else 0
            is_local &= (n >= 0) & (n < len(stack))
            # some other, where it has none
            stack = lax.dynamic_index_in_dim(stack, n, keepdims=False)
        bits = lax.bitcast_convert_type(stack, f"uint{8 * stack.dtype.itemsize}").astype(jnp.uint32)
        return lax.psum(jnp.where(is_local, bits, jnp.uint32(0)), sum(axes, ()))

    given = sharding.spec, None
    return jax.shard_map(take, mesh=sharding.mesh, in_specs=given, out_specs=own)(stack, at)


def _weights(config: ModelConfig, tensors: Iterable[str] = ()) -> dict[str, _Weight]:
    """Return what a model's weights are made of, by their paths; where there are ``tensors``, by the names
    that these have."""
    base = dataclasses.replace(config, lora=None)
    file = json.loads(config.described.file) if config.described else None
    run = families.family_of(file["model_type"] if file else family(dataclasses.asdict(config)))
    weights, present = dict[str, _Weight](), " ".join(tensors)
    others = {x: y for x, y in run["otherwise"].items() if y[0].rpartition("{}")[2] in present}
    for path, weight in base.weights().items():
        kind = kind_of(path)
        layers = [i for i, k in enumerate(base.layer_kinds) if k == max(kind, 0)]
        name, order = _name(path.replace(f"blocks.{kind}.", "blocks."), run["tensors"] | others)
        weights[path] = _Weight(name, weight, layers, order)
    groups = {name: file[key] for name, key in run["groups"].items() if file}
    for parts in _groups(weights).values():
        for place, path in enumerate(parts):
            num = groups.get(weights[path].name, 0 if run.get("interleaved") else 1)
            weights[path].share([weights[x] for x in parts], place, num)
    return weights


def _name(path: str, theirs: dict[str, Any]) -> tuple[str, str | None]:
    """Return the name of a weight in a family's files, and the order of its dims there: "" that of ours, None
    theirs of matrices and vectors."""
    name, order = theirs.get(path, TENSOR_NAMES.get(path)), None
    if isinstance(name, list):
        name, order = [*name, ""][:2]
    for ours, other in theirs.items():
        name = name if ours.startswith("blocks.") else name.replace(ours, other)
    return name, order


def _groups(weights: dict[str, _Weight]) -> dict[tuple[str, ...], list[str]]:
    """Return the paths of the weights that share tensors, by the names of these."""
    groups = dict[tuple[str, ...], list[str]]()
    for path, weight in weights.items():
        groups.setdefault(tuple(weight.names), []).append(path)
    return groups


def tensors_of(
    weights: dict[str, _Weight], get: Callable[[str], Any], dtype: str
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield each tensor with its name, joined of the weights that it holds; ``get`` gives one by its path."""
    for names, paths in _groups(weights).items():
        own = (weights[path].write(get(path), dtype) for path in paths)
        for name, parts in zip(names, zip(*own, strict=True), strict=True):
            first, at = weights[paths[0]], weights[paths[0]].axis
            apart = [
                part.reshape(*part.shape[:at], -1, weights[path].rows, *part.shape[at + 1 :])
                for path, part in zip(paths, parts, strict=True)
            ]
            joined = np.concatenate(apart, at + 1) if len(apart) > 1 else apart[0]
            yield name, joined.reshape(first.their_shape)


def from_state_dict(
    tensors: Mapping[str, Any], config: ModelConfig, shardings: Tree = None, dtype: str = "float32"
) -> Tree:
    """Make parameters of tensors by Hugging Face name, each put straight onto its sharding (default: the
    first device). Of a part of the tree of ``shardings`` that part is read.

    A tensor is an array, or a slice of a safetensors file. Refuses what `check_tensors` does.
    """
    check_tensors(tensors, config)
    tensors = _of_text(tensors)
    weights = _weights(config, tensors)
    only = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    where = dict.fromkeys(weights, only) if shardings is None else flatten_dict(shardings, sep=".")
    place = lambda path, to: weights[path].place(tensors, to, np.dtype(dtype))
    return unflatten_dict(
        {path: place(path, to) for path, to in where.items() if path in weights}, sep="."
    )


def check_tensors(tensors: Mapping[str, Any], config: ModelConfig) -> None:
    """Refuse missing, unexpected, misshapen and quantized tensors by name.

    Two redundant ones may be there: ``rotary_emb.inv_freq`` of old files (computed here), and a tied model's
    output head (if it equals the embedding). So may what is left out: layers that predict further tokens, and
    a part that sees pictures.
    """
    tensors = _of_text(tensors)
    weights = _weights(config, tensors)
    expected = {name: weight.their_shape for weight in weights.values() for name in weight.names}
    extra = {
        name
        for name in tensors.keys() - expected.keys()
        if not name.endswith(".rotary_emb.inv_freq") and not name.startswith(LEFT_OUT)
    }
    if config.described and '"num_nextn_predict_layers"' in config.described.file:
        later = f"model.layers.{config.num_layers}."
        extra = {name for name in extra if not name.startswith(later)}
    if config.tied and {"lm_head.weight"} == extra and TENSOR_NAMES["embedding"] in tensors:
        head, table = tensors["lm_head.weight"], tensors[TENSOR_NAMES["embedding"]]
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
        more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise ValueError(
            f"these tensors are not the model '{config.name}': {'; '.join(sorted(faults)[:3])}{more}; use"
            " the config.json that they came with"
        )


def _of_text(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors by the names that they have in a file of text alone."""
    return {name.replace("model.language_model.", "model."): x for name, x in tensors.items()}


def _describe(tensor) -> tuple[tuple[int, ...], str]:
    """Return shape and type of number of an array, or of a slice of a file."""
    if hasattr(tensor, "get_shape"):
        return tuple(tensor.get_shape()), tensor.get_dtype()
    return tuple(tensor.shape), str(tensor.dtype)


def load(
    folder: str | os.PathLike, config: ModelConfig, shardings: Tree = None, dtype: str = "float32"
) -> Tree:
    """Read parameters from a folder, placed as `from_state_dict` does.

    Reads what the devices of this process need and no more; one tensor at a time is in host memory.
    """
    return from_state_dict(open_folder(folder), config, shardings, dtype)


def open_folder(folder: str | os.PathLike) -> dict[str, Any]:
    """Open the tensors of a folder by name, none of them read yet: those of its ``model.safetensors``, or of
    the shards that its index.json names. Quantized ones are opened as the weights that they stand for."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ValueError(
            "Hugging Face weights need the package safetensors; install the extra llmpar[hf]"
        ) from error
    tensors = dict[str, Any]()
    for file in _files(pathlib.Path(folder)):
        check_ordinary(file, "file of weights")
        try:
            opened = safetensors.safe_open(file, framework="numpy")
        except (OSError, safetensors.SafetensorError) as error:
            again = "" if isinstance(error, OSError) else "; fetch that file again"
            raise ValueError(f"cannot read weights from '{file}': {error}{again}") from error
        for name in opened.keys():
            if name in tensors:
                raise ValueError(
                    f"tensor '{name}' is in '{file}' and in a file before it; give it once"
                )
            tensors[name] = opened.get_slice(name)
        tensors |= float8_tensors(file)
    return expanded(tensors, pathlib.Path(folder))


def fingerprint(folder: str | os.PathLike) -> str:
    """Sixteen hex digits of what the tensors of a folder are: every one's name, shape, kind and first row. It
    takes no time, and differs for another training of the same model."""
    tensors, digest = open_folder(folder), hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name} {_describe(tensors[name])}".encode() + tensors[name][:1].tobytes())
    return digest.hexdigest()[:16]


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the safetensors files of a folder."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ValueError(
            f"'{folder}' has neither {whole.name} nor {index.name}; give a folder with weights"
        )
    weight_map = read_json(index, "index of weights").get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(name, str) for name in weight_map.values()
    ):
        refuse(index, "index of weights", "its weight_map names no files; fetch that file again")
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if name != pathlib.PurePath(name).name]:
        refuse(
            index, "index of weights", f"it names '{outside[0]}', which is no file of that folder"
        )
    return [folder / name for name in names]


# What comes with a tokenizer.json and is copied with it.
_BESIDE = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def save(
    folder: str | os.PathLike,
    params: Tree | Callable[[str], Any],
    config: ModelConfig,
    dtype: str = "float32",
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write weights, in one file or in shards of `SHARD_BYTES` with an index, and ``config.json``.

    Tensors are written one after the other, and each file appears under its name when it is complete;
    config.json is the last. Of several processes that hold the weights all call this, and the first writes.

    Args:
        params: the weights, or what gives the one of a path, so that not all need to be in memory.
        dtype: ``float32`` or ``bfloat16``.
        tokenizer: what the model was trained with. Its ``tokenizer.json`` is copied with the files that lie
            beside it, and config.json and generation_config.json name the tokens that begin a text and end
            it.
    """
    if dtype not in _KINDS:
        raise ValueError(f"weights are not written as {dtype}; use {' or '.join(_KINDS)}")
    path, weights = pathlib.Path(folder), _weights(config)
    about = to_hugging_face(config) | {"torch_dtype": dtype}
    get = params if callable(params) else flatten_dict(params, sep=".").__getitem__
    tensors = (tensor for _, tensor in tensors_of(weights, get, dtype))
    files = _headers({name: w.their_shape for w in weights.values() for name in w.names}, dtype)
    if jax.process_index() != 0:
        for _ in tensors:  # each process has its part in it
            pass
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
        if others := sorted({file.name for file in path.glob("*.safetensors*")} - {*files, INDEX}):
            raise ValueError(
                f"'{folder}' holds other weights already ({others[0]}); give another folder"
            )
        for name in (INDEX, "config.json"):  # without them what an interruption leaves is no model
            (path / name).unlink(missing_ok=True)
        for name, header in files.items():
            _write(path / name, header, tensors)
        if len(files) > 1:
            where = {tensor: name for name, header in files.items() for tensor in header}
            _put_json(path / INDEX, {"metadata": {"dtype": dtype}, "weight_map": where})
        if tokenizer is not None:
            about |= _save_tokenizer(path, tokenizer)
        _put_json(path / "config.json", about)
    except OSError as error:
        for part in path.glob("*.part"):  # which would fill the disk
            part.unlink(missing_ok=True)
        raise ValueError(
            f"cannot write the model to '{folder}': {error.strerror}; free some room, or give another folder"
        ) from error


def _headers(shapes: dict[str, tuple[int, ...]], dtype: str) -> dict[str, dict[str, Any]]:
    """Return the files by name, and in each the tensors: their kind, shape, and where their bytes lie."""
    kind, itemsize = _KINDS[dtype]
    headers, end = [dict[str, Any]()], 0
    for name, shape in shapes.items():
        size = itemsize * math.prod(shape)
        if headers[-1] and end + size > SHARD_BYTES:
            headers, end = [*headers, {}], 0
        headers[-1][name] = {"dtype": kind, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    if len(headers) == 1:
        return {"model.safetensors": headers[0]}
    named = "model-{:05}-of-{:05}.safetensors"
    return {named.format(i, len(headers)): header for i, header in enumerate(headers, 1)}


def _write(path: pathlib.Path, header: dict[str, Any], tensors: Iterator[np.ndarray]) -> None:
    """Write one file of the safetensors format: the length of its header, the header, the tensors."""
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors are aligned
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in itertools.islice(tensors, len(header)):
            file.write(tensor.reshape(-1).view(np.uint8).data)
    os.replace(part, path)


def _save_tokenizer(path: pathlib.Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Write what belongs to a tokenizer, and give the tokens that begin a text and end it. (Bytes have no
    file there, and no token that ends a text.)"""
    ids: dict[str, Any] = {"bos_token_id": tokenizer.start_id}
    if isinstance(tokenizer, FileTokenizer):
        sources = {"tokenizer.json": pathlib.Path(tokenizer.file)}
        sources |= {name: tokenizer.beside(name) for name in _BESIDE}
        for name, source in sources.items():
            if source.is_file() and source.parent.resolve() != path.resolve():
                shutil.copyfile(source, path / name)
        for name in ("config.json", "generation_config.json"):  # the second has the last word
            ids |= {k: v for k, v in tokenizer.about(name).items() if k == "eos_token_id"}
    if not (path / "generation_config.json").exists():
        _put_json(path / "generation_config.json", ids)
    return ids


def _put_json(path: pathlib.Path, entries: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(entries, indent=2) + "\n")
    os.replace(part, path)


# ------------------------------------------------------------------------------------------- adapters of LoRA


def adapters_of(path: str, config: ModelConfig) -> list[str]:
    """Return the paths of a weight's adapters, A and B; none where it has none."""
    (part, _, name), weights = path.rpartition("."), config.weights()
    return [x for x in (f"{part}.lora.{name}_a", f"{part}.lora.{name}_b") if x in weights]


def merged(params: Any, config: ModelConfig) -> Any:
    """Return a tree of weights, or a part of one, without adapters: W + A B · alpha / rank, added up in
    float32 with W's sharding, one matrix of all layers after the other."""
    flat, weights = flatten_dict(params, sep="."), config.weights()
    for path in list(flat):
        if (lora := config.lora) and (pair := adapters_of(path, config)):
            w, a, b = (parse_layout(weights[name].dims).letters for name in (path, *pair))
            add = functools.partial(_add_product, f"{a},{b}->{w}", lora.scale)
            sharding = getattr(flat[path], "sharding", None)
            flat[path] = jax.jit(add, out_shardings=sharding)(
                flat[path], *(flat.pop(name) for name in pair)
            )
    return unflatten_dict(flat, sep=".")


def _add_product(
    equation: str, scale: float, w: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array:
    w, a, b = (x.astype("float32") for x in (w, a, b))
    return w + scale * jnp.einsum(equation, a, b, precision="highest")
