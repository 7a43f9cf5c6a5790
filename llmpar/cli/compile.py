"""``llmpar compile``: one training step, compiled for a cluster that is not here."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from llmpar.cli.options import (
    File,
    Number,
    PlanFlags,
    StepOptions,
    check_picture,
    say,
    show,
    start,
    still_at_work,
)

USUAL = {"gpu": "seconds", "tpu": "one to five minutes"}
"""Of processor time, that a compilation takes."""
BIG = {"dtype": "bfloat16", "remat": "selective", "loss_chunks": 8}
"""What large models are trained with: defaults here, where `train` has those of a model that fits
anywhere."""
BigFlags = dataclasses.make_dataclass(
    "Plan",
    [(f.name, f.type, BIG.get(f.name, f.default)) for f in dataclasses.fields(PlanFlags)],
    namespace={"__doc__": PlanFlags.__doc__},
    frozen=True,
)


@dataclass(frozen=True)
class TargetOptions(StepOptions):
    """What one training step is, and the cluster that it is compiled for.

    Attributes:
        target: hosts x GPUs as h100:8x8 (a100, a100-40, h100, h200, b200), or a TPU slice as v5p:4x4x4 (v4,
            v5e, v5p, v6e, 7x); 2*v5e:4x4 is two slices.
        model: a preset's name, or the path of a Hugging Face config.json.
        batch_size: sequences per step, over all devices; None: one per device.
        seq_len: tokens per sequence.
        mesh: sizes of the axes, as 'dp=2 fsdp=-1 tp=2' (or 'dp:2,fsdp:-1,tp:2'); one may be -1.
        mesh_dim: the same as numbers dp,fsdp,tp,sp as in LWM, or dp,fsdp,mp as in EasyLM; replaces --mesh.
    """

    target: str = "h100:8x8"
    model: str = "llama3-8b"
    batch_size: Number = None  # type: ignore[assignment]
    seq_len: int = 8192
    mesh: str = "fsdp=-1"
    devices: tyro.conf.Suppress[int] = 8
    plan: Annotated[Any, tyro.conf.arg(constructor=BigFlags)] = BigFlags()


@dataclass(frozen=True)
class Compile:
    """Compile one training step for a cluster, by its own compiler and without a device, and read the
    program.

    llmpar compile --target h100:8x8 --mesh "fsdp=8 tp=8" --tp-sequence

    Attributes:
        svg: also draw the schedule of a layer into this SVG (or PNG).
        json: print one JSON document on stdout.
    """

    svg: File = None
    json: bool = False
    step: TargetOptions = TargetOptions()

    def run(self) -> dict:
        """Compile, print tables unless JSON was asked for, and refuse what does not fit."""
        from llmpar.inspect.targets import QUIET, parse_target

        check_picture(self.svg)
        target = parse_target(self.step.target)
        os.environ.update(QUIET)  # before JAX starts
        from llmpar.inspect import aot

        start()
        config, plan = self.step.settle(len(target.devices), own=BIG)
        batch_size = target.num_devices if self.step.batch_size is None else self.step.batch_size
        say(f"compiling a step of {config.name} on {plan.mesh} for {target.text} …")
        with still_at_work("compiling", f"{USUAL[target.platform]} of processor time are usual", every_s=20):
            document = aot.compile_step(config, plan, target, batch_size, self.step.seq_len)
        show(document, aot, "the schedule", self.svg if "turns" in document else None, self.json)
        if not document["fits"]:
            raise ValueError(document["why"])
        return document
