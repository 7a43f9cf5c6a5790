"""Where a command's model comes from: checkpoints, the folder of a Hugging Face model, or chance."""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llmpar.cli.options import Folder, From, Name, fits_host, inform
from llmpar.plan.config_json import QUANTIZED, quantization
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.model_config import ModelConfig
from llmpar.plan.plan import Plan
from llmpar.plan.presets import PRESETS, folder_of, preset
from llmpar.plan.serving import serving_plan
from llmpar.predict.serving import device_cache_bytes
from llmpar.training import tokenizers

Load = Callable[..., Any]
"""Weights from (shardings, dtype)."""


def open_weights(
    checkpoints: str | None,
    from_: str | None,
    model: str | None,
    tokenizer: str | None,
    seed: int = 0,
    best: bool = False,
) -> tuple[ModelConfig, tokenizers.Tokenizer, Load, list[str]]:
    """Return a model, its tokenizer, the loader of its weights, and notes for people. Refuse what cannot be
    loaded, before any weight is read.

    Args:
        checkpoints, from_: folders, one at most; without them weights are random, drawn by ``seed``.
        model: a preset or a config.json. Left out, that of the weights, or tiny.
        tokenizer: left out, the one that the model was trained with; if that is unknown, bytes.
        best: of the checkpoints the one with the lowest held-out loss.
    """
    if best and checkpoints is None:
        raise ValueError("--best needs --checkpoints; give it, or leave --best out")
    if from_ is not None:
        others = {"--model": model, "--checkpoints": checkpoints}
        given = [flag for flag, value in others.items() if value is not None]
        model, name, load, notes = from_folder(from_, given, tokenizer or None)
        config, reader = preset(model), tokenizers.open_tokenizer(name)
    elif checkpoints is not None:
        from llmpar.training.checkpoint import Checkpoints

        keep = Checkpoints(checkpoints, take_best=best)
        about = keep.about()
        config = about["config"] if model is None else preset(model).must_run()
        reader, notes = tokenizers.tokenizer_of(about["made"], tokenizer), []
        if tokenizer is None and "tokenizer" not in about["made"]:
            notes = ["the checkpoint does not name its tokenizer: using 'bytes'"]

        def load(shardings, dtype="float32"):
            return _cast(keep.params(shardings, config), dtype)

    else:
        config = preset(model or "tiny").must_run()
        reader = tokenizers.open_tokenizer(tokenizer or "bytes")
        random = "the weights are random, and so will be the text: give --from or --checkpoints"
        notes = [beside(model or "tiny") or random]

        def load(shardings, dtype="float32"):
            import jax

            from llmpar.model.weights import init_params

            return jax.jit(
                lambda: _cast(init_params(config, seed), dtype), out_shardings=shardings
            )()

    tokenizers.check_vocab(reader, config.vocab_size)
    return config, reader, load, notes


@dataclass(frozen=True)
class ModelOptions:
    """Which model answers, and where.

    Attributes:
        checkpoints: folder that llmpar train --checkpoints wrote.
        from_: folder of a Hugging Face model (config.json, safetensors, tokenizer.json), or the name of a
            downloaded one. Without it and checkpoints weights are random.
        best: of the checkpoints the one with the lowest held-out loss, not the newest.
        model: a preset's name, or the path of a config.json or its folder; left out, the
            checkpoint's, or tiny.
        mesh: sizes of the axes; tp cuts the cache's heads, sp its positions, and dp, fsdp and ep the
            requests, where there are several.
        devices: CPU devices to simulate where there is no accelerator.
        tokenizer: 'bytes', or the path of a Hugging Face tokenizer.json; left out, the model's, or bytes.
        dtype: of weights and cache.
    """

    checkpoints: Folder = None
    from_: From = None
    best: bool = False
    model: Name = None
    mesh: str = "sp=-1"
    devices: int = 8
    tokenizer: Name = None
    dtype: Literal["float32", "bfloat16"] = "float32"

    def plan(self) -> Plan:
        """Return the plan, on the devices that are present, or else simulated."""
        from llmpar.parallel.mesh import use_devices

        mesh = parse_mesh(self.mesh, len(use_devices(self.devices, at_least=1)))
        return Plan(mesh, zero=0, dtype=self.dtype)

    def opened(self, seed: int = 0) -> tuple[ModelConfig, tokenizers.Tokenizer, Load, list[str]]:
        """Call `open_weights` with these options."""
        return open_weights(
            self.checkpoints, self.from_, self.model, self.tokenizer, seed, self.best
        )

    def engine(
        self, plan: Plan, config: ModelConfig, load: Load, notes: list[str], slots: int, length: int
    ):
        """Return the engine with its weights; refuse what does not fit before they are read."""

        from llmpar.model.weights import weights_tree
        from llmpar.parallel.mesh import make_mesh, sharding, split_axes
        from llmpar.serve.engine import Engine

        serving = serving_plan(plan, config, slots, length)
        cache = device_cache_bytes(serving, slots, length)
        fits_host(serving, slots, plan.mesh.sp, ("params",), cache)
        inform(*notes)
        mesh = make_mesh(plan.mesh)
        place = lambda w: sharding(split_axes(mesh, serving.mesh), serving.stored(w.dims))
        params = load(weights_tree(config, place), self.dtype)
        inform("compiling …")
        return Engine(config, plan, mesh, params, slots, length)


def _cast(params: Any, dtype: str) -> Any:
    import jax

    return jax.tree.map(lambda x: x.astype(dtype), params)


def from_folder(
    name: str, given: Sequence[str] = (), tokenizer: str | None = None
) -> tuple[str, str, Load, list[str]]:
    """Return the names of the model and the tokenizer (its own, if none is named) of a Hugging Face folder or
    of a downloaded model, the loader of its weights, and notes for people. No weight is read yet, but tensors
    that the model does not have are refused, and flags that are ``given`` for another model."""
    from llmpar.training import hugging_face as hf

    if given:
        raise ValueError(f"--from brings a model and its weights; leave {' and '.join(given)} out")
    folder = folder_of(name)
    if not os.path.isdir(folder):
        raise ValueError(
            f"--from '{name}' is no folder; give the folder of config.json and safetensors, or the"
            " name of a downloaded model"
        )
    if quantized := quantization(folder):
        raise ValueError(
            f"the weights in '{folder}' are quantized to {quantized} ({QUANTIZED}), which is not"
            " supported; use the original model"
        )
    # a folder may have the name of a preset
    model = os.path.join(".", name) if folder == name else name
    config, tensors = preset(model).must_run(), hf.open_folder(folder)
    hf.check_tensors(tensors, config)
    load = functools.partial(hf.from_state_dict, tensors, config)
    own = os.path.join(folder, "tokenizer.json")
    if tokenizer is not None or os.path.isfile(own):
        return model, own if tokenizer is None else tokenizer, load, []
    return model, "bytes", load, [f"{name} has no tokenizer.json: using the tokenizer 'bytes'"]


def beside(model: str) -> str | None:
    """Return a note if weights are random although a model's own lie beside its config.json."""
    folder = folder_of(model if os.path.isdir(model) else os.path.dirname(model) or ".")
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    if model in PRESETS or not files:
        return None
    return f"the weights are random; give --from {folder} to load those in {files[0]}"
