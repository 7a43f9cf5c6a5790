"""What several commands share: the options of a step, printing, and refusals before the work."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import sys
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from llmpar.config import ModelConfig, preset
from llmpar.notation import parse_mesh
from llmpar.plan import Plan

MAX_SEED, MAX_SEQ_LEN, MAX_TOKENS = 2**32 - 1, 2**31 - 1, 2**40
"""JAX makes keys of 32 bits; positions are int32; sizes of arrays are counted in 64 bits."""
PICTURES = (".svg", ".png")

Words = Annotated[str | None, tyro.conf.arg(metavar="STR")]
File = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Number = Annotated[int | None, tyro.conf.arg(metavar="INT")]


def speaks() -> bool:
    """Whether this process prints and draws: the first of those that work together. (Without looking for
    devices.)"""
    jax = sys.modules.get("jax")
    return jax is None or not jax.distributed.is_initialized() or jax.process_index() == 0


def say(*words) -> None:
    """Print for people, on stderr."""
    if speaks():
        print(*words, file=sys.stderr, flush=True)


def emit(document: dict, as_json: bool) -> None:
    """Print the document on stdout if it was asked for."""
    if as_json and speaks():
        print(json.dumps(document))


@dataclass(frozen=True)
class GradientOptions:
    """Gradients: when they are summed.

    Attributes:
        zero: ZeRO stage on the fsdp axis.
        microbatches: per step and device; gradients are summed over them. A pipeline is filled by them.
        reduce: when gradients are summed: at the end, layer by layer, or in buckets.
        bucket_bytes: a bucket of gradients is closed when it has reached this size.
    """

    zero: Literal[0, 1, 2, 3] = 3
    microbatches: int = 1
    reduce: Literal["end", "layer", "bucket"] = "end"
    bucket_bytes: int = 4 << 20


@dataclass(frozen=True)
class MemoryOptions:
    """Memory: what is computed, gathered or held again instead of kept.

    Attributes:
        remat: recompute nothing, or whole blocks, in the backward pass.
        reshard_after_forward: ZeRO-3: let gathered weights go, and gather them again in the backward pass.
        loss_chunks: pieces of the sequence whose logits exist one after the other.
        ffn_chunks: pieces of the sequence that go through a feed-forward one after the other.
    """

    remat: Literal["none", "block"] = "none"
    reshard_after_forward: bool = True
    loss_chunks: int = 1
    ffn_chunks: int = 1


@dataclass(frozen=True)
class SequenceOptions:
    """Long sequences: attention where sp cuts positions.

    Attributes:
        tp_sequence: sequence parallelism: cut the residual stream's sequence by tp.
        context_parallel: pass keys around a ring, exchange positions for heads, or gather all keys.
        sequence_order: how positions are dealt to the ranks of sp.
        attention_block: queries and keys per block of attention; it must divide what a device holds.
        attention_kernel: who computes attention to whole sequences: this package, cuDNN, or plain XLA.
    """

    tp_sequence: bool = False
    context_parallel: Literal["ring", "ulysses", "gather"] = "ring"
    sequence_order: Literal["zigzag", "striped", "contiguous"] = "zigzag"
    attention_block: Number = None
    attention_kernel: Literal["portable", "cudnn", "xla"] = "portable"


@dataclass(frozen=True)
class ExpertOptions:
    """Experts: how tokens reach them.

    Attributes:
        dispatch: send tokens to experts in all slots of a buffer, or in the full ones only (not on CPUs).
        grouped: multiply tokens by their experts in a loop over blocks, or by ragged_dot.
    """

    dispatch: Literal["padded", "ragged"] = "padded"
    grouped: Literal["blocks", "ragged_dot"] = "blocks"


@dataclass(frozen=True)
class PipelineOptions:
    """Pipelines: the order of the stages where pp > 1.

    Attributes:
        schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v, …, or an order written out.
        virtual_stages: pieces of the model per stage, for schedules that let one choose.
        stage_saves: what a stage keeps of a forward pass: its input, to recompute from, or all residuals.
    """

    schedule: str = "1f1b"
    virtual_stages: Number = None
    stage_saves: Literal["input", "residuals"] = "input"


@dataclass(frozen=True)
class StepOptions:
    """What one training step is: a model, a batch and a mesh.

    Attributes:
        model: a preset's name, or the path of a Hugging Face config.json.
        batch_size: sequences per step, over all devices.
        seq_len: tokens per sequence.
        mesh: sizes of the axes, as 'dp=2 fsdp=-1 tp=2' (or 'dp:2,fsdp:-1,tp:2'); one may be -1.
        mesh_dim: the same as numbers dp,fsdp,tp,sp as in LWM, or dp,fsdp,mp as in EasyLM; replaces --mesh.
        devices: CPU devices to simulate where there is no accelerator.
        reading: who writes the collectives: we do (manual) or XLA's partitioner (auto).
        dtype: of weights and activations while computing; master weights are float32.
    """

    model: str = "tiny"
    batch_size: int = 16
    seq_len: int = 128
    mesh: str = "dp=-1"
    mesh_dim: Words = None
    devices: int = 8
    reading: Literal["manual", "auto"] = "manual"
    dtype: Literal["float32", "bfloat16"] = "float32"
    gradients: GradientOptions = GradientOptions()
    memory: MemoryOptions = MemoryOptions()
    sequences: SequenceOptions = SequenceOptions()
    experts: ExpertOptions = ExpertOptions()
    pipeline: PipelineOptions = PipelineOptions()

    def resolve(self) -> tuple[ModelConfig, Plan]:
        """The model and the plan, on the devices that are there (or are simulated now). Refuses before
        compiling."""
        from llmpar.mesh import use_devices

        config = preset(self.model)
        devices = use_devices(self.devices)
        mesh = parse_mesh(self.mesh if self.mesh_dim is None else self.mesh_dim, len(devices))
        parts = (self, self.gradients, self.memory, self.sequences, self.experts, self.pipeline)
        asked = {name: value for part in parts for name, value in vars(part).items()}
        plan = Plan(
            **{f.name: asked[f.name] for f in dataclasses.fields(Plan) if f.name in asked} | {"mesh": mesh}
        )
        if self.seq_len > MAX_SEQ_LEN or self.batch_size * self.seq_len > MAX_TOKENS:
            asked_for = f"a batch of {self.batch_size:,} sequences of {self.seq_len:,} tokens"
            raise ValueError(f"{asked_for}: use at most {MAX_SEQ_LEN:,} positions and {MAX_TOKENS:,} tokens")
        plan.check(config, self.batch_size, self.seq_len)
        return config, plan


def check_picture(path: str | None) -> None:
    """Refuse a path that no drawing can be saved to, before the work that it is to show."""
    if path is None:
        return
    if pathlib.Path(path).suffix not in PICTURES:
        raise ValueError(f"a drawing is saved as .svg or .png, and '{path}' is neither; rename it")
    folder = pathlib.Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or pathlib.Path(path).is_dir():
        raise ValueError(
            f"'{path}' cannot be written; give a file in a folder that is there and can be written"
        )


def fits_host(config: ModelConfig, plan: Plan, batch_size: int, seq_len: int, parts: tuple[str, ...]) -> None:
    """Refuse a model whose simulated devices together hold more than this machine's memory."""
    import jax

    from llmpar.data import host_bytes
    from llmpar.predict import memory

    if jax.devices()[0].platform != "cpu" or not (room := host_bytes()):
        return
    held = memory.argument_bytes(config, plan, batch_size, seq_len)
    need = plan.mesh.size * sum(held[part] for part in parts)
    if need > room:
        what = (
            f"{' and '.join(parts)} of '{config.name}' take {need / 2**30:,.1f} GiB on {plan.mesh.size}"
            " simulated devices"
        )
        raise ValueError(
            f"{what}, and this machine has {room / 2**30:,.1f} GiB; use a smaller model, or cut it more"
        )


def start() -> None:
    """Set JAX up: float32, and compiled programs kept between runs, in the user's cache folder unless JAX was
    told another.

    What threads of Orbax log when a file cannot be read or written is kept back: the exception that follows
    says it.
    """
    import jax

    if not os.environ.get("LLMPAR_TRACEBACK"):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = lambda _: None

    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        say("JAX_ENABLE_X64 is ignored: weights are float32, tokens int32")
        jax.config.update("jax_enable_x64", False)
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):  # nobody's home
            jax.config.update(
                "jax_compilation_cache_dir", str(pathlib.Path.home() / ".cache" / "llmpar" / "jax")
            )
