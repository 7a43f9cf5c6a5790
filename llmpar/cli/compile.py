"""``llmpar compile``: one training step, compiled for a cluster that is not here."""

import os
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from llmpar.cli.options import (
    File,
    Number,
    Output,
    StepOptions,
    check_picture,
    flags_of,
    give,
    inform,
    save_picture,
    start_jax,
    still_at_work,
)
from llmpar.plan.plan import Plan

USUAL = {"gpu": "seconds", "tpu": "one to five minutes"}
"""Of processor time, that a compilation takes."""
BIG = {"dtype": "bfloat16", "remat": "selective", "loss_chunks": 8}
"""What large models are trained with: defaults here, where `train` has those of a model that fits
anywhere."""
BigFlags = flags_of(Plan, "mesh", **BIG)


@dataclass(frozen=True)
class TargetOptions(StepOptions):
    """What one training step is, and the cluster that it is compiled for.

    Attributes:
        target: hosts x GPUs as h100:8x8 (a100, a100-40, h100, h200, b200), or a TPU slice as v5p:4x4x4 (v4,
            v5e, v5p, v6e, 7x); 2*v5e:4x4 is two slices.
        batch_size: sequences per step, over all devices; None: one per device.
    """

    target: str = "h100:8x8"
    model: str = "llama3-8b"
    batch_size: Number = None  # type: ignore[assignment]
    seq_len: int = 8192
    mesh: str = "fsdp=-1"
    devices: tyro.conf.Suppress[int] = 8
    plan: Annotated[Any, tyro.conf.arg(constructor=BigFlags)] = BigFlags()


@dataclass(frozen=True)
class Compile(Output):
    """Compile one training step for a cluster, by its own compiler and without a device, and read the
    program.

    llmpar compile --target h100:8x8 --mesh "fsdp=8 tp=8" --tp-sequence

    Attributes:
        svg: also draw the schedule of a layer into this SVG (or PNG).
    """

    svg: File = None
    step: TargetOptions = TargetOptions()

    def run(self) -> dict:
        """Compile, print tables unless JSON was asked for, and refuse what does not fit."""
        from llmpar.planner.targets import COMPILER_ENVIRONMENT, parse_target

        check_picture(self.svg)
        target = parse_target(self.step.target)
        os.environ.update(COMPILER_ENVIRONMENT)  # before JAX starts
        from llmpar.parallel.mesh import device_platform
        from llmpar.planner import aot

        start_jax()
        plan = self.step.settle(len(target.devices), device_platform(target.devices[0]))
        batch_size = target.num_devices if self.step.batch_size is None else self.step.batch_size
        inform(f"compiling a step of {plan.config.name} on {plan.mesh} for {target.text} …")
        usual = f"{USUAL[target.platform]} of processor time are usual"
        with still_at_work("compiling", usual, every_s=20):
            document = aot.compile_step(plan.config, plan, target, batch_size, self.step.seq_len)
        if "turns" in document:
            save_picture(self.svg, "the schedule", lambda: aot.overlap_picture(document))
        give(document, self.json, aot.compile_tables(document))
        if not document["fits"]:
            raise ValueError(document["why"])
        return document
