"""Exercises of lesson 04: what ZeRO's stages hold and send."""

import numpy as np
from jax import lax

from llmpar.exercises import Exercise
from llmpar.exercises.spread import carried_out
from llmpar.predict import formulas

DEVICES, PARTS, ROWS, COLUMNS = 4, 3, 8, 2


def stage3_bytes(devices: int = 8, psi_bytes: int = 16_384) -> Exercise:
    """Ask how many bytes a device sends in one step of the toy at stage 3."""
    lap = (devices - 1) / devices
    wrong = dict(
        stages_0_to_2=2 * psi_bytes * lap,
        own_share_too=3 * psi_bytes,
        all_reduce=4 * psi_bytes * lap,
        shards=3 * psi_bytes / devices,
        one_movement=psi_bytes * lap,
    )
    return Exercise("core", 3 * psi_bytes * lap, wrong, unit="bytes")


def memory_table(params: float = 7e9, devices: int = 4) -> Exercise:
    """Ask for the GB of model state per device at stages 0 to 3, mixed precision with Adam."""

    def table(**sizes):
        return {stage: formulas.zero_bytes(params, devices, stage, **sizes) / 1e9 for stage in range(4)}

    right = table()
    wrong = dict(
        exchanged=right | {1: right[2], 2: right[1]},
        no_master=table(optim_bytes=8),
        stage_3_only={stage: right[0] / devices ** (stage > 0) for stage in range(4)},
        gib={stage: held * 1e9 / 2**30 for stage, held in right.items()},
        float32=table(param_bytes=4, grad_bytes=4, optim_bytes=8),
        other_order=right | {1: (2 + 2) * params / devices / 1e9 + 12 * params / 1e9, 2: right[1]},
        divided_twice={stage: held / devices for stage, held in right.items()},
        per_parameter={stage: held / params * 1e9 for stage, held in right.items()},
        no_gradient=right | {3: 14 * params / devices / 1e9},
        weights_whole=right | {3: 2 * params / 1e9},
    )
    return Exercise("core", right, wrong, tolerance=0.02)


def stage2_accumulated() -> Exercise:
    """Ask for the sum over microbatches as stage 2 makes it: reduce-scatter each gradient, add up the
    shards."""

    scatter = lambda g: lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)

    def solution(gradient, parts):
        cut = lambda g: lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)
        return sum(cut(gradient(part)) for part in parts)

    def all_reduced(gradient, parts):
        total = sum(lax.psum(gradient(part), "fsdp") for part in parts)
        own = total.shape[0] // lax.axis_size("fsdp")
        return lax.dynamic_slice_in_dim(total, lax.axis_index("fsdp") * own, own, 0)

    untiled = lambda gradient, parts: sum(lax.psum_scatter(gradient(part), "fsdp") for part in parts)
    gathered = lambda gradient, parts: lax.all_gather(solution(gradient, parts), "fsdp", axis=0, tiled=True)
    gradients = np.random.default_rng(0).standard_normal((DEVICES, PARTS, ROWS, COLUMNS)).astype(np.float32)

    def observe(learner):
        try:
            run = lambda parts: learner(lambda part: 2 * part, list(parts))
            return carried_out(run, "fsdp", DEVICES, gradients)
        except ValueError as error:
            if "must match shard count" in str(error):
                return "not tiled"
            raise

    wrong = dict(
        stage1=lambda gradient, parts: scatter(sum(gradient(part) for part in parts)),
        all_reduced=all_reduced,
        never_asked=lambda gradient, parts: sum(scatter(part) for part in parts),
        untiled=untiled,
        only_last=lambda gradient, parts: [scatter(gradient(part)) for part in parts][-1],
        mean=lambda gradient, parts: solution(gradient, parts) / len(parts),
        gathered=gathered,
        only_first=lambda gradient, parts: scatter(gradient(parts[0])),
    )
    return Exercise("stretch", solution, wrong, observe=observe)


def keep_or_gather(accumulate: int = 4) -> Exercise:
    """Ask what three policies send and hold, in units of Ψ elements, with several microbatches and many
    devices."""
    u = accumulate
    right = {"again": (3 * u, 0), "keep": (2 * u, 1), "keep all step": (u + 1, 1)}
    wrong = dict(
        gradients_whole=right | {"keep all step": (2, 1)},
        one_microbatch=right | {"again": (3, 0), "keep": (2, 1), "keep all step": (2, 1)},
        shard_kept=right | {"keep": (2 * u, 1 / 8), "keep all step": (u + 1, 1 / 8)},
        no_gradients=right | {"again": (2 * u, 0), "keep": (u, 1)},
        again_two=right | {"again": (2 * u, 0)},
        keep_three=right | {"keep": (3 * u, 1)},
        step_each=right | {"keep all step": (2 * u, 1)},
        again_holds=right | {"again": (3 * u, 1)},
        keep_holds_none=right | {"keep": (2 * u, 0)},
    )
    return Exercise("expert", right, wrong)
