"""Exercises of lesson 01: bytes of a training state, what fits, where attention overtakes, which inputs to
keep."""

from llmpar.config import preset
from llmpar.exercises import Exercise


def state_gb() -> Exercise:
    """Ask how many GB Adam in mixed precision holds of Llama 3 8B."""
    params = preset("llama3-8b").num_params
    return Exercise(
        level="core",
        solution=16 * params / 1e9,
        wrong=[
            (
                2 * params / 1e9,
                "Those are the weights in 16 bits. Training holds gradients and more besides.",
            ),
            (
                4 * params / 1e9,
                "Weights and gradients, 2 + 2. The optimizer holds three times as much again.",
            ),
            (12 * params / 1e9, "That is the optimizer alone: a float32 copy and two moments."),
            (
                8 * params / 1e9,
                "Two moments in float32 are 8. There are a float32 copy, weight and gradient too.",
            ),
        ],
        hint="2 for the weight, 2 for the gradient, 4 + 4 + 4 for the optimizer, times the parameters.",
        tolerance=0.01,
    )


def days() -> Exercise:
    """Ask for the days that 1,024 H100s at 40 % of peak need for Llama 3 8B and 15T tokens, attention not
    counted."""
    params, seconds = preset("llama3-8b").num_params, 1024 * 0.4 * 989.4e12
    right = 6 * params * 15e12 / seconds / 86400
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (right / 3, "2 per parameter and token is the forward pass; the backward pass is twice as much."),
            (
                right * 4 / 3,
                "8 is with everything computed twice forward. Nothing was said of recomputation.",
            ),
            (right * 0.4, "That is at the full peak; only 40 % of it is reached."),
            (right * 24, "Those are hours."),
        ],
        hint=(
            "6 FLOPs per parameter and token; 989.4e12 FLOPs a second of each H100, of which 40 % are"
            " reached."
        ),
        tolerance=0.02,
    )


def fits() -> Exercise:
    """Ask on how many A100-40 the state of an 8B model fits, and how many GB it leaves for activations on
    four."""
    state = 16 * preset("llama3-8b").num_params / 1e9
    right = {"least": 4, "left on 8": 40 - state / 8}
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (right | {"least": 1}, "least: 16 GB of weights fit on one. The state is eight times that."),
            (right | {"least": 3}, "least: three of them have 120 GB, and 128.5 are held."),
            (right | {"left on 8": 40 - state}, "left on 8: the state is cut into eight parts."),
            (
                right | {"left on 8": 40 - state / 4},
                "left on 8: that is on four; each of eight holds half as much.",
            ),
        ],
        hint="The state is 128.5 GB, cut evenly; a device has 40 GB.",
        tolerance=0.02,
    )


def crossover() -> Exercise:
    """Ask from which sequence length on attention computes more than all weights of Llama 3 8B."""
    c = preset("llama3-8b")
    used = c.num_params - c.vocab_size * c.width
    right = 6 * used / (12 * c.num_layers * c.num_heads * c.head_width)
    return Exercise(
        level="stretch",
        solution=right,
        wrong=[
            (
                6 * c.num_params / (12 * c.num_layers * c.num_heads * c.head_width),
                "Nearly: reading the embedding is a look-up and no product. Leave its parameters out.",
            ),
            (2 * right, "That counts the causal half. Here the whole square counts, as in 12 l n h s."),
            (
                6 * used / (12 * c.num_layers * c.num_kv_heads * c.head_width),
                "Every query head has scores of its own, also where heads share keys: n, not k.",
            ),
            (right / 3, "Attention's products have a backward pass too: 12, not 4."),
        ],
        hint="6 (Ψ - v d) = 12 l n h s. Solve for s.",
        tolerance=0.01,
    )


def keep_every() -> Exercise:
    """Ask which inputs to keep: a function of the layers and of a layer's activations over its input."""

    def solution(layers, ratio):
        return min(range(1, layers + 1), key=lambda c: -(-layers // c) + c * ratio)

    return Exercise(
        level="expert",
        solution=solution,
        observe=lambda function: [function(*given) for given in ((64, 17), (80, 5), (100, 1), (8, 17))],
        wrong=[
            (lambda layers, ratio: 1, "One is best for short stacks only: many kept inputs are not free."),
            (
                lambda layers, ratio: round(layers**0.5),
                "The root of the layers is right where a layer keeps no more than its input (ratio 1).",
            ),
            (lambda layers, ratio: layers, "Then everything is alive at once while the backward pass runs."),
            (
                lambda layers, ratio: max(1, round((layers * ratio) ** 0.5)),
                "A large ratio makes a group expensive: it divides, it does not multiply.",
            ),
        ],
        hint=(
            "With every c-th input kept: l/c inputs, and while a group runs backward c layers: minimise the"
            " sum."
        ),
    )
