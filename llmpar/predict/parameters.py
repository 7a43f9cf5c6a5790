"""What is counted of a model beside its own parameters: those that are trained, and the layers that predict
further tokens; and what a reader of the numbers should know.
"""

import dataclasses
import math

from llmpar.plan.model_config import ModelConfig, Weight, count_params


def trained_params(config: ModelConfig) -> int:
    """Return how many parameters gradients change: all, or those of the adapters."""
    rows = config.weights().values() if config.lora else ()
    return sum(math.prod(w.shape) for w in rows if not w.frozen) or config.num_params


def params_of_a_layer(block: ModelConfig) -> int:
    """Return the parameters of one layer of a kind."""
    return count_params(block.block_weights(), block.runs)


def with_further(config: ModelConfig) -> ModelConfig:
    """Return the model with the layers that predict further tokens (MTP), if its file has some.

    They are its last ones. Each is like the last layer, and joins a state and a token by a
    matrix, with norms of both and of its result (DeepSeek-V3 2024, section 2.2).
    It is for planning: nothing runs them.
    """
    described, d = config.described, config.width
    if not described or not described.further or config.num_further:
        return config
    count = described.further
    join = Weight("stream z d t", (count, d, 2 * d), config.init_scale)
    norms = Weight("stream z t d", (count, 3, d), is_vector=True)
    counted = "(MTP) are counted in memory, FLOPs and time, and training here leaves them out"
    described = dataclasses.replace(
        described,
        ends=(*described.ends, ("further.join", join), ("further.norms.scale", norms)),
        notes=tuple(x.replace("(MTP) are not counted", counted) for x in _own_notes(config)),
    )
    return dataclasses.replace(
        config, num_layers=config.num_layers + count, num_further=count, described=described
    )


def end_products(config: ModelConfig) -> int:
    """Return the weights outside of layers that multiply a token: of the head, once more
    for each layer that predicts further tokens, and of its join."""
    d, further = config.width, config.num_further
    return (1 + further) * config.vocab_size * d + further * 2 * d**2


def notes_on(config: ModelConfig) -> list[str]:
    """Return what a reader of a model's numbers should know, in sentences."""
    alone = f"'{config.name}' is planned, and does not run here: {config.why_planned}"
    return [alone] * (not config.runs) + _own_notes(config)


def _own_notes(config: ModelConfig) -> list[str]:
    """Return the notes without whether the model runs; on its parameters without further layers."""
    described, d = config.described, config.width
    if described is None or config.num_further:
        return list(described.notes) if described else []
    notes, total, looked_up = [*described.notes], config.num_params, config.vocab_size * d
    if count := described.further:  # each like the last layer, with a join and norms
        last = config.blocks[config.layer_kinds[-1]][1]
        size = total + count * (params_of_a_layer(last) + 2 * d**2 + 3 * d)
        notes.append(
            f"with the MTP layers about {size / 1e9:,.4g} B parameters;"
            f" {(size + count * 2 * looked_up) / 1e9:,.4g} B where they have an embedding and a head of"
            " their own"
        )
    active = config.active_params  # most makers give it without an embedding of its own
    if active < total and not config.tied and looked_up >= active / 100:
        without = (active - looked_up) / 1e9
        notes.append(f"active parameters without the embedding: {without:.3g} billion")
    return notes
