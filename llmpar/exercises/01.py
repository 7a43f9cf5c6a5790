"""Exercises of lesson 01: bytes of a training state, what fits, where attention overtakes, which inputs to
keep."""

from llmpar.config import preset
from llmpar.exercises import Exercise


def state_gb() -> Exercise:
    """Ask how many GB Adam in mixed precision holds of Llama 3 8B."""
    return Exercise("core", 16 * preset("llama3-8b").num_params / 1e9, tolerance=0.01)


def days() -> Exercise:
    """Ask for the days that 1,024 H100s at 40 % of peak need for Llama 3 8B and 15T tokens, attention not
    counted."""
    params, seconds = preset("llama3-8b").num_params, 1024 * 0.4 * 989.4e12
    right = 6 * params * 15e12 / seconds / 86400
    return Exercise("core", right, tolerance=0.02)


def fits() -> Exercise:
    """Ask on how many A100-40 the state of an 8B model fits, and how many GB it leaves for activations on
    eight."""
    state = 16 * preset("llama3-8b").num_params / 1e9
    return Exercise("core", {"least": 4, "left on 8": 40 - state / 8}, tolerance=0.02)


def crossover() -> Exercise:
    """Ask from which sequence length on attention computes more than all weights of Llama 3 8B."""
    c = preset("llama3-8b")
    used = c.num_params - c.vocab_size * c.width  # a row of the table is looked up
    per_position = 12 * c.num_layers * c.num_heads * c.head_width
    return Exercise("stretch", 6 * used / per_position, tolerance=0.01)


def keep_every() -> Exercise:
    """Ask which inputs to keep: a function of the layers and of a layer's activations over its input."""

    def solution(layers, ratio):
        return min(range(1, layers + 1), key=lambda c: -(-layers // c) + c * ratio)

    wrong = dict(
        every_layer=lambda layers, ratio: 1,
        root_of_layers=lambda layers, ratio: round(layers**0.5),
        all_layers=lambda layers, ratio: layers,
        multiplied=lambda layers, ratio: max(1, round((layers * ratio) ** 0.5)),
        groups=lambda layers, ratio: -(-layers // solution(layers, ratio)),
        held=lambda layers, ratio: min(-(-layers // c) + c * ratio for c in range(1, layers + 1)),
        not_whole=lambda layers, ratio: (layers / ratio) ** 0.5,
        rounded_down=lambda layers, ratio: max(1, int((layers / ratio) ** 0.5)),
        no_root=lambda layers, ratio: max(1, layers // ratio),
    )
    run = lambda function: [function(*given) for given in ((64, 17), (80, 5), (100, 1), (8, 17))]
    return Exercise("expert", solution, wrong, run)
