"""llmpar: learn, plan and run LLM parallelism in JAX. A layout is a line of text, a movement is an arrow.

plan/        what a user writes, checked and decided: layouts, arrows between them, meshes, schedules (no JAX)
parallel/    how an arrow is carried out: collectives; the modes Solo, Manual (shard_map), Auto, Explicit
kernels/     attention and experts on GPUs and TPUs
model/       the Llama: attention (ring attention too) and experts, without a mesh axis in the text
pipeline/    a stage, its backward pass in two parts, an executor for any schedule
training/    a step: gradients are summed, optimizer state is cut; the loop, data, checkpoints, other formats
predict/     what would it cost? traffic, memory, time, serving (no JAX)
planner/     which mesh, and why not the others? and programs for clusters that you do not have
inspect/     what did the compiler make of it? of any JAX program
draw/        pictures of layouts, arrows, schedules, programs (no JAX)
explore/     explorers, in notebooks and in pages that bring their own Python
serve/       a server for requests that join and leave
launch/      processes on several hosts
lessons/     exercises, their hints and their judge
cli/         the same from a terminal

The first six are the compact package, read in an afternoon in this order; the rest is built around it
(docs/architecture.md).
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["MeshExplorer", "Plan", "Step", "check", "explain", "from_type", "look", "make_mesh"]
__all__ += ["preset", "two_meshes", "use_devices"]

if TYPE_CHECKING:
    from llmpar.explore.explorer import MeshExplorer
    from llmpar.inspect.check import check
    from llmpar.inspect.explain import explain
    from llmpar.inspect.look import look
    from llmpar.parallel.mesh import from_type, make_mesh, use_devices
    from llmpar.plan.plan import Plan
    from llmpar.plan.presets import preset
    from llmpar.plan.two_meshes import two_meshes
    from llmpar.training.step import Step

_FILES = {
    "MeshExplorer": "explore.explorer",
    "Plan": "plan.plan",
    "Step": "training.step",
    "check": "inspect.check",
    "explain": "inspect.explain",
    "from_type": "parallel.mesh",
    "look": "inspect.look",
    "make_mesh": "parallel.mesh",
    "preset": "plan.presets",
    "two_meshes": "plan.two_meshes",
    "use_devices": "parallel.mesh",
}


def __getattr__(name: str):
    """Load a name from its file when it is first asked for, so that importing llmpar loads no JAX."""
    import importlib

    if name not in _FILES:
        raise AttributeError(
            f"llmpar has no {name!r}; it has {', '.join(__all__)}, and a file for the rest"
        )
    return getattr(importlib.import_module(f"llmpar.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
