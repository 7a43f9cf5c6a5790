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
    return Exercise(
        level="core",
        solution=3 * psi_bytes * lap,
        wrong=[
            (
                2 * psi_bytes * lap,
                (
                    "That is stages 0 to 2. At stage 3 a weight is thrown away after its use, and the"
                    " backward pass needs it again."
                ),
            ),
            (
                3 * psi_bytes,
                (
                    "Almost: a ring of N devices sends each message (N-1)/N times, because everybody has one"
                    " share already."
                ),
            ),
            (
                4 * psi_bytes * lap,
                (
                    "You counted an all-reduce of the gradient. A reduce-scatter is half of it, and here"
                    " nobody needs the other half."
                ),
            ),
            (
                3 * psi_bytes / devices,
                "That is three shards. A device passes on every shard but one of each gathered weight.",
            ),
            (
                psi_bytes * lap,
                "That is one movement, such as one gather. A weight moves three times at stage 3: where?",
            ),
        ],
        hint="Count three movements, each of the whole weights: two gathers and one reduce-scatter.",
        unit="bytes",
        nudges=["How often is a weight gathered, and what happens to its gradient?"],
        because=(
            "Each weight is gathered twice, forward and backward, and its gradient is scattered once: three"
            " messages of all weights, of which a ring sends (N-1)/N."
        ),
    )


def memory_table(params: float = 7e9, devices: int = 4) -> Exercise:
    """Ask for the GB of model state per device at stages 0 to 3, mixed precision with Adam."""

    def table(**sizes):
        return {stage: formulas.zero_bytes(params, devices, stage, **sizes) / 1e9 for stage in range(4)}

    right = table()
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (
                right | {1: right[2], 2: right[1]},
                (
                    "You have exchanged stages 1 and 2: the optimizer's state is cut first, because it is the"
                    " largest part and nobody else needs it."
                ),
            ),
            (
                table(optim_bytes=8),
                "K is 12, not 8: beside the two moments there is a float32 master copy of the weights.",
            ),
            (
                {stage: right[0] / devices ** (stage > 0) for stage in range(4)},
                (
                    "Only stage 3 cuts everything. Stage 1 still holds whole weights and whole gradients, 4"
                    " bytes per parameter."
                ),
            ),
            (
                {stage: held * 1e9 / 2**30 for stage, held in right.items()},
                "These are GiB (2^30 bytes). The papers and the table above count GB (1e9 bytes).",
            ),
            (
                table(param_bytes=4, grad_bytes=4, optim_bytes=8),
                (
                    "That is training in float32 throughout: right at stage 0 by chance (4 + 4 + 8 = 16), but"
                    " the parts are cut at different stages. In mixed precision they are 2, 2 and 12."
                ),
            ),
            (
                right | {1: (2 + 2) * params / devices / 1e9 + 12 * params / 1e9, 2: right[1]},
                "1 and 2: the order is optimizer (1), then gradients (2), then weights (3).",
            ),
            (
                {stage: held / devices for stage, held in right.items()},
                ("Each is divided by the devices once more. Stage 0 cuts nothing: 16 bytes per parameter."),
            ),
            (
                {stage: held / params * 1e9 for stage, held in right.items()},
                "These are bytes per parameter; times 7e9 parameters they are right.",
            ),
            (
                right | {3: 14 * params / devices / 1e9},
                "3: at stage 3 all 16 bytes are divided by the devices: 2 + 2 + 12.",
            ),
            (right | {3: 2 * params / 1e9}, "3: the weights are cut as well at stage 3."),
        ],
        hint=(
            "Stage 0 holds 2 + 2 + 12 bytes per parameter. Stage 1 divides the 12 by the devices, stage 2"
            " also one 2, stage 3 all."
        ),
        tolerance=0.02,  # rounded by hand, to whole GB
        nudges=["Of the 16 bytes per parameter, which ones does each stage cut?"],
        because=(
            "Stage 1 cuts the optimizer's 12 bytes, stage 2 the gradients' 2 as well, and stage 3 the"
            " weights' 2 too. Of 40 GB, stage 3 leaves 12 for everything else, and stage 2 hardly any."
        ),
    )


def stage2_accumulated() -> Exercise:
    """Ask for the sum over microbatches as stage 2 makes it: reduce-scatter each gradient, add up the
    shards."""

    def scatter(g):
        return lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)

    def solution(gradient, parts):
        cut = lambda g: lax.psum_scatter(g, "fsdp", scatter_dimension=0, tiled=True)
        return sum(cut(gradient(part)) for part in parts)

    def stage1(gradient, parts):
        return scatter(sum(gradient(part) for part in parts))

    def all_reduced(gradient, parts):
        total = sum(lax.psum(gradient(part), "fsdp") for part in parts)
        own = total.shape[0] // lax.axis_size("fsdp")
        return lax.dynamic_slice_in_dim(total, lax.axis_index("fsdp") * own, own, 0)

    def never_asked(gradient, parts):
        return sum(scatter(part) for part in parts)

    def untiled(gradient, parts):
        return sum(lax.psum_scatter(gradient(part), "fsdp", scatter_dimension=0) for part in parts)

    def only_last(gradient, parts):
        return [scatter(gradient(part)) for part in parts][-1]

    def mean(gradient, parts):
        return solution(gradient, parts) / len(parts)

    def gathered(gradient, parts):
        return lax.all_gather(solution(gradient, parts), "fsdp", axis=0, tiled=True)

    gradients = np.random.default_rng(0).standard_normal((DEVICES, PARTS, ROWS, COLUMNS)).astype(np.float32)

    def observe(learner):
        try:
            return carried_out(
                lambda parts: learner(lambda part: 2 * part, list(parts)), "fsdp", DEVICES, gradients
            )
        except ValueError as error:
            if "must match shard count" in str(error):
                return "not tiled"
            raise

    return Exercise(
        level="stretch",
        solution=solution,
        wrong=[
            (
                stage1,
                (
                    "The value is right, but this is still stage 1: it adds up whole gradients and scatters"
                    " once. Scatter each microbatch's gradient before you add."
                ),
            ),
            (
                all_reduced,
                (
                    "The value is right, but an all-reduce sends twice what is needed: everybody receives the"
                    " whole sum and keeps a slice. Use psum_scatter."
                ),
            ),
            (never_asked, "You add up the microbatches themselves: call gradient(part) on each."),
            (
                untiled,
                (
                    f"psum_scatter without tiled=True wants a leading dim of exactly {DEVICES}, one entry per"
                    f" device, and drops it. With it, [{ROWS}, {COLUMNS}] becomes [{ROWS // DEVICES},"
                    f" {COLUMNS}]."
                ),
            ),
            (only_last, "Only the last microbatch arrives: add the shards up."),
            (
                mean,
                (
                    "You divided by the number of microbatches. The loss has been divided by the size of the"
                    " whole batch already: add, do not average."
                ),
            ),
            (
                gathered,
                (
                    "The sum is right, but gathered again. The optimizer's state is a shard, and its gradient"
                    " need be no more."
                ),
            ),
            (
                lambda gradient, parts: scatter(gradient(parts[0])),
                "Only the first microbatch arrives: scatter each, and add the shards up.",
            ),
        ],
        hint="One psum_scatter per microbatch, then add up what it returns.",
        observe=observe,
        nudges=["What is whole in stage 1's sum, and for how long?"],
        because=(
            "The sum of shards is the shard of the sum. So each gradient can be scattered as soon as it"
            " exists, and nothing whole is ever added up; the price is one reduce-scatter per microbatch."
        ),
    )


def keep_or_gather(accumulate: int = 4) -> Exercise:
    """Ask what three policies send and hold, in units of Ψ elements, with several microbatches and many
    devices."""
    u = accumulate
    right = {"again": (3 * u, 0), "keep": (2 * u, 1), "keep all step": (u + 1, 1)}
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (
                right | {"keep all step": (2, 1)},
                (
                    "The weights are gathered once, but whole gradients are not held: they are"
                    " reduce-scattered after every microbatch."
                ),
            ),
            (
                right | {"again": (3, 0), "keep": (2, 1), "keep all step": (2, 1)},
                (
                    "That is one microbatch. Gathered weights are dropped at its end, so the next one gathers"
                    " them again."
                ),
            ),
            (
                right | {"keep": (2 * u, 1 / 8), "keep all step": (u + 1, 1 / 8)},
                "What is kept is the gathered weight, whole, not the shard: a full Ψ.",
            ),
            (
                right | {"again": (2 * u, 0), "keep": (u, 1)},
                "Do not forget the gradients: each microbatch reduce-scatters Ψ besides what it gathers.",
            ),
            (
                right | {"again": (2 * u, 0)},
                (
                    "again: a gather forward, another one backward, and a reduce-scatter: three movements per"
                    " microbatch."
                ),
            ),
            (
                right | {"keep": (3 * u, 1)},
                (
                    "keep: what is kept need not be gathered for the backward pass: two movements per"
                    " microbatch."
                ),
            ),
            (
                right | {"keep all step": (2 * u, 1)},
                "keep all step: the weights are gathered once in the whole step, not once per microbatch.",
            ),
            (
                right | {"again": (3 * u, 1)},
                (
                    "again: nothing gathered is held when the forward pass ends; that is why it is gathered"
                    " again."
                ),
            ),
            (
                right | {"keep": (2 * u, 0)},
                (
                    "keep: the gathered weights stay until the backward pass has used them: all of them are"
                    " there when the forward pass ends."
                ),
            ),
        ],
        hint=(
            "Per microbatch: one Ψ for each time that the weights are gathered, and one Ψ for the gradients."
        ),
        nudges=["For each policy: how often are the weights gathered in a step, and when are they dropped?"],
        because=(
            "u microbatches scatter u times. The weights are gathered 2u, u and 1 times. Kept for the whole"
            " step, weights are whole on every device while gradients are cut: that is ZeRO-2."
        ),
    )
