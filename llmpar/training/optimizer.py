"""The optimizers that have a name here: they know the model's weights. A `Step` takes any of Optax."""

import dataclasses

import optax

from llmpar.model.weights import weights_tree
from llmpar.plan.model_config import ModelConfig, OptimizerConfig
from llmpar.plan.plan import Plan
from llmpar.training.muon import muon


def make_optimizer(
    options: OptimizerConfig, steps: int, config: ModelConfig
) -> optax.GradientTransformation:
    """Make the Optax optimizer that ``options`` name, with its schedule of rates; :class:`Step` clips."""
    rate, warmup = options.learning_rate, min(options.warmup, max(steps - 1, 0))
    first, rest = 0.0 if warmup else rate, max(steps - warmup, 1)
    falling = {
        "cosine": optax.cosine_decay_schedule(rate, rest, alpha=0.1),
        "linear": optax.linear_schedule(rate, rate / 10, rest),
        "constant": optax.linear_schedule(rate, rate, rest),
    }
    rising = optax.linear_schedule(first, rate, warmup)
    schedule = optax.join_schedules([rising, falling[options.decay]], [warmup])
    match options.optimizer:
        case "adamw":
            decays = weights_tree(config, lambda weight: not weight.is_vector, trainable=True)
            return optax.adamw(schedule, b2=0.95, weight_decay=options.weight_decay, mask=decays)
        case "adafactor":
            return optax.adafactor(schedule)
        case "muon":
            return muon(schedule, config, options.weight_decay)
        case "sgd":
            return optax.sgd(schedule, momentum=0.9)


def fitted(plan: Plan, options: OptimizerConfig) -> Plan:
    """Return the plan for this optimizer: Muon's matrices are gathered where the plan leaves that open."""
    if options.optimizer == "muon" and plan.muon == "none":
        return dataclasses.replace(getattr(plan, "requested", plan), muon="gather")
    if options.optimizer != "muon" and plan.muon != "none":
        raise ValueError(
            f"muon='{plan.muon}' lays out the state of Muon, and the optimizer is {options.optimizer}; use"
            " optimizer='muon' (--optimizer muon), or leave muon out"
        )
    return plan
