"""The optimizers that have a name here. A `Step` takes any Optax optimizer; these know the model's
weights."""

from __future__ import annotations

import jax
import optax

from llmpar.config import ModelConfig, OptimizerConfig, Weight
from llmpar.notation import parse_layout
from llmpar.weights import Tree, described


def make_optimizer(options: OptimizerConfig, steps: int, config: ModelConfig) -> optax.GradientTransformation:
    """Make the Optax optimizer that ``options`` name, with its schedule of rates. The step clips
    (:class:`Step`)."""
    rate, warmup = options.learning_rate, min(options.warmup, max(steps - 1, 0))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0 if warmup else rate, rate, warmup, max(steps, warmup + 1), rate / 10
    )
    if options.optimizer == "adamw":
        return optax.adamw(schedule, b2=0.95, weight_decay=options.weight_decay, mask=_matrices(config))
    if options.optimizer == "adafactor":
        return optax.adafactor(schedule)
    if options.optimizer == "muon":
        return optax.contrib.muon(
            schedule,
            weight_decay=options.weight_decay,
            muon_weight_dimension_numbers=muon_dims(config),
            adam_weight_decay=0.0,
        )
    return optax.sgd(schedule, momentum=0.9)


def _matrices(config: ModelConfig) -> Tree:
    """Mark the weights that decay: matrices, not norms' scales and biases."""
    return jax.tree.map(lambda weight: not weight.is_vector, described(config))


def muon_dims(config: ModelConfig) -> Tree:
    """Tell Muon (Jordan et al. 2024) how each weight is a matrix: which dims it sums over, which it makes.

    Embedding and head, norms and biases are None: Adam trains those.
    """

    def numbers(weight: Weight):
        layout = parse_layout(weight.dims)
        if weight.is_vector or layout.region == "vocab":
            return None
        letters = layout.letters
        into = "d" if not letters.endswith("d") else letters.strip("ld")
        return optax.contrib.MuonDimensionNumbers(
            tuple(letters.index(x) for x in into),
            tuple(i for i, x in enumerate(letters) if x not in into + "l"),
        )

    return jax.tree.map(numbers, described(config))
