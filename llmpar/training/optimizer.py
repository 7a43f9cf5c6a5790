"""The optimizers that have a name here: they know the model's weights. A `Step` takes any of Optax."""

import jax
import optax

from llmpar.model.weights import Tree, described, trained
from llmpar.plan.layout import parse_layout
from llmpar.plan.model_config import ModelConfig, OptimizerConfig, Weight


def make_optimizer(
    options: OptimizerConfig, steps: int, config: ModelConfig
) -> optax.GradientTransformation:
    """Make the Optax optimizer that ``options`` name, with its schedule of rates; :class:`Step` clips."""
    rate, warmup = options.learning_rate, min(options.warmup, max(steps - 1, 0))
    first, steps = 0.0 if warmup else rate, max(steps, warmup + 1)
    schedule = optax.warmup_cosine_decay_schedule(first, rate, warmup, steps, rate / 10)
    if options.decay != "cosine":
        last = rate / 10 if options.decay == "linear" else rate
        rising = optax.linear_schedule(first, rate, warmup)
        schedule = optax.join_schedules(
            [rising, optax.linear_schedule(rate, last, steps - warmup)], [warmup]
        )
    if options.optimizer == "adamw":
        learned = trained(described(config), config)
        decays = jax.tree.map(lambda weight: not weight.is_vector, learned)
        return optax.adamw(schedule, b2=0.95, weight_decay=options.weight_decay, mask=decays)
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


def muon_dims(config: ModelConfig) -> Tree:
    """Tell Muon (Jordan et al. 2024) how each weight is a matrix: which dims it sums over, which it makes.
    Embedding and head, norms and biases are None: Adam trains those."""

    def numbers(weight: Weight):
        layout = parse_layout(weight.dims)
        if weight.is_vector or layout.region == "vocab":
            return None
        letters = layout.letters
        into = "d" if not letters.endswith("d") else letters.strip("ld")
        if "z" in letters:  # an adapter's A, or its B
            into = "z" if letters.startswith("lz") else letters.strip("lz")
        return optax.contrib.MuonDimensionNumbers(
            tuple(letters.index(x) for x in into),
            tuple(i for i, x in enumerate(letters) if x not in into + "l"),
        )

    return jax.tree.map(numbers, trained(described(config), config))
