"""Exercises of lesson 11 that are computed: a bet on a mesh."""

import functools

from llmpar.lessons import Exercise
from llmpar.plan.mesh_shape import parse_mesh
from llmpar.plan.presets import preset
from llmpar.planner import planner
from llmpar.predict import hardware
from llmpar.predict.hardware import GIB


@functools.cache
def seconds(mesh: str = "") -> float:
    """Return the time of a step of Llama 3 70B on a mesh of 64 A100s, or on the best one. Raise ValueError
    for an impossible mesh, or one on which it does not fit."""
    chip = hardware.chip("a100-80")
    question = planner.Question(preset("llama3-70b"), chip, 64, 64, 8192, share=chip.memory_share)
    if not mesh:
        return planner.decide(question, keep=1).plans[0].time.step_s
    shape = parse_mesh(mesh, 64)
    if shape.size < 64:
        raise ValueError(f"mesh '{mesh}' has {shape.size} devices, and there are 64")
    one = planner.on_mesh(question, shape)
    if one.why_not:
        raise ValueError(
            f"{mesh} does not fit: a GPU would hold {one.total_bytes / GIB:.1f} GiB, and may use"
            f" {question.capacity_bytes / GIB:.1f}."
        )
    return one.time.step_s


def bet() -> Exercise:
    """Ask for a fast mesh; any that is as fast as the fastest, by what the estimates are worth, is right."""

    def observe(mesh: str) -> float:
        if not mesh.strip():
            raise ValueError("Write a mesh of 64 GPUs, such as 'pp=8 tp=8': axes and their sizes.")
        times = seconds(mesh) / seconds()
        return 1.0 if times < 1 + planner.ERROR else times

    return Exercise(
        "core", "fsdp=16 tp=4", observe=observe, counts=dict(slower=lambda times: dict(times=times))
    )
