"""Exercises of lesson 11 that are computed: a bet on a mesh."""

import functools
import math
import re

from llmpar.lessons import Exercise
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.presets import preset
from llmpar.planner import planner
from llmpar.predict import hardware


@functools.cache
def seconds(mesh: str = "") -> float:
    """Return the time of a step of Llama 3 70B on a mesh of 64 A100s, or on the best one. Raise ValueError
    for an impossible mesh, or one on which it does not fit."""
    chip, fixed = hardware.chip("a100-80"), parse_mesh(mesh).sizes if mesh else {}
    if mesh and math.prod(fixed.values()) != 64:
        raise ValueError(f"mesh '{mesh}' has {math.prod(fixed.values())} devices, and there are 64")
    question = planner.Question(
        preset("llama3-70b"), chip, 64, 64, 8192, fixed, share=chip.memory_share
    )
    try:
        return planner.decide(question, keep=1).plans[0].time.step_s
    except ValueError as refusal:
        if sizes := re.search(r"holds ([\d.]+) GiB > ([\d.]+)", str(refusal)):
            raise ValueError(
                f"{mesh} does not fit: a GPU would hold {sizes[1]} GiB, and may use {sizes[2]}."
            ) from refusal
        raise


def bet() -> Exercise:
    """Ask for a fast mesh; any that is as fast as the fastest, by what the estimates are worth, is right."""

    def observe(mesh: str) -> float:
        if not mesh.strip():
            raise ValueError("Write a mesh of 64 GPUs, such as 'pp=8 tp=8': axes and their sizes.")
        times = seconds(mesh) / seconds()
        return 1.0 if times < 1 + planner.ERROR else times

    hints = dict(slower=lambda times: dict(times=times))
    return Exercise("core", "fsdp=16 tp=4", observe=observe, counts=hints)
