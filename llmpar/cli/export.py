"""``llmpar export``: hand a trained model on."""

import os
import pathlib
import signal
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import tyro

from llmpar.cli.options import Name, Output, give, inform, start_jax
from llmpar.cli.weights import open_weights
from llmpar.launch import signals


@dataclass(frozen=True)
class Export(Output):
    """Write a checkpoint as a Hugging Face model: config.json, safetensors, its tokenizer's files. Adapters
    are added to their weights.

    llmpar export kept model --dtype bfloat16

    Attributes:
        checkpoints: folder that llmpar train --checkpoints wrote.
        folder: where to write; it must not hold a model yet.
        dtype: of the weights there.
        best: take the checkpoint with the lowest held-out loss, not the newest.
        tokenizer: the tokenizer.json that the model was trained with, where it is no longer where it was.
    """

    checkpoints: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINTS")]
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    dtype: Literal["float32", "bfloat16"] = "float32"
    best: bool = False
    tokenizer: Name = None

    def run(self) -> dict:
        """Read one weight after the other, and write its tensors."""
        if not self.folder or os.path.exists(os.path.join(self.folder, "config.json")):
            raise ValueError(
                f"'{self.folder}' is no new folder, or holds a model already; give another one"
            )
        import jax
        from flax.traverse_util import flatten_dict, unflatten_dict

        from llmpar.training import hugging_face as hf

        start_jax()
        config, tokenizer, load, notes = open_weights(
            self.checkpoints, None, None, self.tokenizer, best=self.best
        )
        inform(*notes)
        on_host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])

        def weight(path: str):
            where = dict.fromkeys((path, *hf.adapters_of(path, config)), on_host)
            return flatten_dict(hf.merged(load(unflatten_dict(where, sep=".")), config), sep=".")[
                path
            ]

        base = replace(config, lora=None)
        with signals.signals_to(self.interrupted, [signal.SIGINT]):
            hf.save(self.folder, weight, base, self.dtype, tokenizer)
        files = sorted(os.listdir(self.folder))
        shown = f"{base.name}, {base.num_params:,} parameters: {', '.join(files)} in {self.folder}"
        document = {
            "model": base.name,
            "params": base.num_params,
            "folder": self.folder,
            "files": files,
        }
        return give(document, self.json, [shown])

    def interrupted(self, number: int) -> None:
        """End at once, without what is half written; what is whole is no model without its config.json."""
        for part in pathlib.Path(self.folder).glob("*.part"):
            part.unlink(missing_ok=True)
        signals.end("interrupted", 128 + number)
