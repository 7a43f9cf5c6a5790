"""The exercises of lesson 03: data parallelism."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from llmpar.exercises import Exercise

CLIP = 1.0
"""The largest gradient norm in `repair`."""


def sent(params: int = 107_840, devices: int = 8) -> Exercise:
    """Ask how many bytes a device sends per step to sum float32 gradients, by ring all-reduces."""
    message = 4 * params
    return Exercise(
        level="core",
        solution=2 * message * (devices - 1) / devices,
        wrong=[
            (
                message,
                (
                    "That is the size of the gradients. A ring goes around twice: once to add, once to share"
                    " the sums."
                ),
            ),
            (
                2 * message,
                "Nearly: cut into a piece per device, each time around one of the pieces need not be sent.",
            ),
            (
                message * (devices - 1),
                "That sends all to every other device; a ring adds on the way and sends far less.",
            ),
            (
                message * (devices - 1) / devices,
                "That is the first half, the reduce-scatter; the sums must still be gathered.",
            ),
            (2 * params * (devices - 1) / devices, "That is the number of elements; a float32 has 4 bytes."),
            (
                2 * params * 4 * (devices - 1),
                (
                    "That sends everything to every other device, twice. A ring adds on the way: cut the"
                    " message into a piece per device."
                ),
            ),
            (
                2 * params,
                (
                    "Two bytes each would be bfloat16; these gradients are float32, and a ring goes around"
                    " twice."
                ),
            ),
        ],
        hint=(
            "A ring all-reduce of V bytes among N devices sends 2 V (N - 1) / N from each; V is 4 bytes per"
            " parameter."
        ),
        unit="bytes",
        nudges=["How many bytes has the gradient of one parameter, and how often does the ring go around?"],
        because=(
            "4 bytes per parameter; a ring goes around twice, to add and to share the sums, and each time a"
            " device sends all pieces of the message but one."
        ),
    )


def repair() -> Exercise:
    """Ask for the mean gradient over unevenly many targets, and for the same clipped by its norm.

    An answer is judged on four simulated devices made by `jax.vmap`, so that one real device is enough.
    """
    rng = np.random.default_rng(3)
    grad_sums, counts = (
        jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) * 9,
        jnp.asarray([1.0, 2.0, 4.0, 8.0], jnp.float32),
    )

    def norm(g):
        return jnp.sqrt(jnp.sum(g * g))

    def limit(size):
        return jnp.minimum(jnp.float32(1), jnp.float32(CLIP) / size)

    def mean(grad_sum, count):
        return lax.psum(grad_sum, "dp") / lax.psum(count, "dp")

    def sum_of_means(grad_sum, count):
        return lax.psum(grad_sum / count, "dp")

    def mean_of_means(grad_sum, count):
        return lax.pmean(grad_sum / count, "dp")

    def clipped(grad_sum, count):
        return mean(grad_sum, count) * limit(norm(mean(grad_sum, count)))

    def scaled_up(grad_sum, count):
        g = mean(grad_sum, count)
        return g * jnp.float32(CLIP) / norm(g)

    def clipped_alone(grad_sum, count):
        g = grad_sum / lax.psum(count, "dp")
        return lax.psum(g * limit(norm(g)), "dp")

    def norms_added(grad_sum, count):
        g = grad_sum / lax.psum(count, "dp")
        return lax.psum(g, "dp") * limit(jnp.sqrt(lax.psum(jnp.sum(g * g), "dp")))

    def own_mean_clipped(grad_sum, count):
        g = grad_sum / count
        return lax.pmean(g * limit(norm(g)), "dp")

    def sum_clipped(grad_sum, count):
        g = lax.psum(grad_sum, "dp")
        return g * limit(norm(g)) / lax.psum(count, "dp")

    gradients = [
        (
            sum_of_means,
            "gradient: a sum of N means is some N times too large; divide once, by the sum of counts.",
        ),
        (
            mean_of_means,
            (
                "gradient: a device with one target weighs as much as one with eight; add first, then divide"
                " once."
            ),
        ),
    ]
    gradients += [
        (
            lambda grad_sum, count: lax.psum(grad_sum, "dp"),
            "gradient: that is the sum over all targets. Divide it by their number, on all devices together.",
        ),
        (
            lambda grad_sum, count: grad_sum / count,
            "gradient: that is each device's own mean; nobody has added yet, and weights would drift apart.",
        ),
    ]
    clips = [
        (
            clipped_alone,
            (
                "clipped: every device scales by its own part's norm; only the finished sum has the norm that"
                " counts."
            ),
        ),
        (
            scaled_up,
            (
                "clipped: to clip is to shorten what is too long; you also stretch a gradient that is short"
                " enough."
            ),
        ),
        (
            norms_added,
            (
                "clipped: squares of parts do not add up to the square of their sum; take the norm after the"
                " sum."
            ),
        ),
        (
            own_mean_clipped,
            "clipped: every device clips its own mean; these do not add up to the mean of all.",
        ),
        (
            sum_clipped,
            "clipped: you measure the sum over all targets; the mean is what is clipped, so divide first.",
        ),
        (mean, "clipped: nothing is clipped; where the norm is above 1, scale by 1 over it."),
        (
            lambda grad_sum, count: jnp.clip(mean(grad_sum, count), -CLIP, CLIP),
            "clipped: that cuts each element, which turns the gradient. Scale all of it by one number.",
        ),
    ]

    def run(answer: dict) -> dict:
        """What every device has, of gradients that are longer than the limit and of shorter ones."""
        over_devices = {name: jax.vmap(function, axis_name="dp") for name, function in answer.items()}
        return {
            name: np.stack([np.asarray(function(grad_sums * scale, counts)) for scale in (1, 0.02)])
            for name, function in over_devices.items()
        }

    return Exercise(
        level="core",
        solution={"gradient": mean, "clipped": clipped},
        observe=run,
        wrong=[({"gradient": g, "clipped": clipped}, why) for g, why in gradients]
        + [({"gradient": mean, "clipped": c}, why) for c, why in clips],
        hint=(
            "Add gradients and counts over the devices first; divide, measure and scale only what they then"
            " share."
        ),
        nudges=[
            "Which numbers differ between devices, and which must be the same before you divide by them or"
            " measure them?"
        ],
        because=(
            "A mean over all targets is the sum of sums over the sum of counts, and only the finished mean"
            " has the norm that is to be clipped."
        ),
    )


def bucket(
    layers: int = 32, backward_s: float = 0.080, all_reduce_s: float = 0.060, latency_s: float = 0.001
) -> Exercise:
    """Ask for the bucket, in layers, with which computing and communicating side by side end soonest."""

    def end(size: int) -> float:
        number = layers // size
        compute, comm = backward_s / number, latency_s + all_reduce_s / number
        return max(backward_s + comm, compute + number * comm)

    sizes = [size for size in range(1, layers + 1) if layers % size == 0]
    best = min(sizes, key=end)
    return Exercise(
        level="stretch",
        solution=best,
        wrong=[
            (
                sizes[0],
                (
                    "Too small: with a latency each, buckets take longer than the backward pass and queue at"
                    " its end."
                ),
            ),
            (2 * best, "Only the last bucket is waited for, which is right, but half of it would do."),
            (4 * best, "Only the last bucket is waited for, but it holds many layers; try smaller ones."),
            (
                sizes[-1],
                "One bucket is full when the backward pass is over: nothing is left to hide it behind.",
            ),
            (
                layers // 2,
                (
                    "With two buckets, half of all that is sent waits for the end of the backward pass."
                    " Smaller ones hide more."
                ),
            ),
            (3, "32 layers do not divide into buckets of 3; of 1, 2, 4, 8, 16 and 32 one is best."),
        ],
        hint="Try all six: end(compute_s, comm_s) of this lesson with 32/k buckets of k layers.",
        nudges=[
            "What do small buckets cost, and what do large ones?",
            (
                "The last bucket is waited for; and if a bucket takes longer to send than to compute, they"
                " queue."
            ),
        ],
        because=(
            "Buckets as small as possible, since the last one is waited for, but not so small that their"
            " latencies make sending slower than computing."
        ),
    )


def pad() -> Exercise:
    """Ask for a function that fills up targets so that their rows divide by the number of devices."""

    def solution(targets, devices):
        missing = -len(targets) % devices
        rows = np.full((missing, *targets.shape[1:]), -1, targets.dtype)
        return np.concatenate([targets, rows])

    def drop(targets, devices):
        return targets[: len(targets) // devices * devices]

    def zeros(targets, devices):
        return np.concatenate(
            [targets, np.zeros((-len(targets) % devices, *targets.shape[1:]), targets.dtype)]
        )

    def repeat(targets, devices):
        return np.concatenate([targets, np.repeat(targets[-1:], -len(targets) % devices, axis=0)])

    def always(targets, devices):
        missing = devices - len(targets) % devices
        return np.concatenate([targets, np.full((missing, *targets.shape[1:]), -1, targets.dtype)])

    def columns(targets, devices):
        return np.pad(targets, ((0, 0), (0, -targets.shape[1] % devices)), constant_values=-1)

    asked = [
        (np.arange(1, 16).reshape(5, 3), 4),
        (np.arange(1, 25).reshape(8, 3), 4),
        (np.arange(1, 4).reshape(3, 1), 8),
    ]
    return Exercise(
        level="expert",
        solution=solution,
        observe=lambda function: [
            np.asarray(function(targets.copy(), devices)) for targets, devices in asked
        ],
        wrong=[
            (drop, "That throws the last rows away: the epoch's end is never learned from."),
            (
                zeros,
                (
                    "Token 0 is a token like any other: the model would be taught to predict it. -1 is what"
                    " is not counted."
                ),
            ),
            (repeat, "The repeated row counts again, and pulls the mean towards itself."),
            (always, "With rows that divide already, this adds a whole round of padding."),
            (columns, "That fills up positions; it is rows that are dealt out to devices."),
            (
                lambda targets, devices: np.concatenate(
                    [np.full((-len(targets) % devices, *targets.shape[1:]), -1, targets.dtype), targets]
                ),
                (
                    "Added in front, they move every row to another place. The rows that count stay where"
                    " they are; add behind them."
                ),
            ),
        ],
        hint="How many rows are missing to the next multiple? -len(targets) % devices. Fill them with -1.",
        nudges=["What must a row that is added not do to the sum of losses, and to the count?"],
        because=(
            "Rows of -1 add neither a loss nor a count, so the mean stays; -len(targets) % devices is 0 where"
            " the rows divide already."
        ),
    )
