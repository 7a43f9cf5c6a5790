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
            (
                14 * params / 1e9,
                "That is 2 + 12 bytes per parameter: the weight and the optimizer. The gradient has 2 more.",
            ),
            (
                18 * params / 1e9,
                "That is a gradient in 32 bits. Here it has 16, which are 2 bytes and not 4.",
            ),
            (20 * params / 1e9, "That is 4 + 4 + 12: weight and gradient have 16 bits here, 2 bytes each."),
            (16 * params / 2**30, "Those are GiB of 2**30 bytes; GB of 1e9 bytes are asked for."),
            (16 * params, "Those are bytes. A GB has 1e9 of them."),
            (128 * params / 1e9, "Those are gigabits: 16 + 16 + 3 · 32 bits. A byte has eight."),
        ],
        nudges=["Five numbers are held for each parameter. How many bytes has each of them?"],
        hint="2 for the weight, 2 for the gradient, 4 + 4 + 4 for the optimizer, times the parameters.",
        because=(
            "Weight and gradient have 2 bytes each. The float32 copy and the two moments have 4 bytes each."
            " That is 16 bytes for each of 8.03e9 parameters."
        ),
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
            (right * 2 / 3, "4 per parameter and token is the backward pass alone. The forward pass adds 2."),
            (
                right / 2,
                (
                    "Half of it: a multiplication and an addition are two FLOPs, and the peak is the one"
                    " without sparsity."
                ),
            ),
            (right * 0.4, "That is at the full peak; only 40 % of it is reached."),
            (right / 0.4, "The 40 % are in it twice. They lower the rate once."),
            (right * 24, "Those are hours."),
            (right * 86400, "Those are seconds. A day has 86,400 of them."),
            (right * 1024, "That is one GPU's time. 1,024 of them share the work."),
        ],
        nudges=["How many FLOPs does the training take, and how many does the cluster reach in a second?"],
        hint=(
            "6 FLOPs per parameter and token; 989.4e12 FLOPs a second of each H100, of which 40 % are"
            " reached."
        ),
        because=(
            "A parameter takes 2 FLOPs per token forward and 4 backward, so 7.2e23 in all. The cluster"
            " reaches 4.05e17 a second, and a day has 86,400 seconds."
        ),
        tolerance=0.02,
    )


def fits() -> Exercise:
    """Ask on how many A100-40 the state of an 8B model fits, and how many GB it leaves for activations on
    eight."""
    state = 16 * preset("llama3-8b").num_params / 1e9
    right = {"least": 4, "left on 8": 40 - state / 8}
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (right | {"least": 1}, "least: 16 GB of weights fit on one. The state is eight times that."),
            (right | {"least": 2}, "least: two of them have 80 GB, and 128.5 are held."),
            (right | {"least": 3}, "least: three of them have 120 GB, and 128.5 are held."),
            (right | {"least": state / 40}, "least: devices are whole. Round up, or a part has no place."),
            (right | {"least": 8}, "least: it fits on eight, but fewer are enough."),
            (right | {"left on 8": 40 - state}, "left on 8: the state is cut into eight parts."),
            (
                right | {"left on 8": 40 - state / 4},
                "left on 8: that is on four; each of eight holds half as much.",
            ),
            (
                right | {"left on 8": state / 8},
                "left on 8: that is what each holds. 40 GB less this is left.",
            ),
            (
                right | {"left on 8": 8 * 40 - state},
                "left on 8: that is left on all eight together. Each has an eighth of it.",
            ),
            (
                right | {"left on 8": 40 - state * 1e9 / 2**30 / 8},
                "left on 8: you took GiB of state from GB of memory. The state is 128.5 GB.",
            ),
        ],
        nudges=["How large is the whole state, and how much of it does each device hold?"],
        hint="The state is 128.5 GB, cut evenly; a device has 40 GB.",
        because=(
            "128.5 GB over 40 GB is 3.2, and there are only whole devices. Each of eight holds an eighth of"
            " the state, 16.1 GB, and the rest of its 40 GB is left."
        ),
        tolerance=0.02,
    )


def crossover() -> Exercise:
    """Ask from which sequence length on attention computes more than all weights of Llama 3 8B."""
    c = preset("llama3-8b")
    table = c.vocab_size * c.width
    used = c.num_params - table
    per_position = 12 * c.num_layers * c.num_heads * c.head_width
    right = 6 * used / per_position
    return Exercise(
        level="stretch",
        solution=right,
        wrong=[
            (
                6 * c.num_params / per_position,
                "Nearly: reading the embedding is a look-up and no product. Leave its parameters out.",
            ),
            (
                6 * (used - table) / per_position,
                "Nearly: reading the embedding is no product, but the head is one. Leave out one of the two.",
            ),
            (
                2 * right,
                (
                    "Half of attention is missing. The whole square counts here, and two products: the"
                    " scores, then the values."
                ),
            ),
            (
                6 * used / (12 * c.num_layers * c.num_kv_heads * c.head_width),
                "Every query head has scores of its own, also where heads share keys: n, not k.",
            ),
            (3 * right, "Attention's products have a backward pass too: 12, not 4."),
            (right / 3, "The weights' products have a backward pass too: 6 per parameter, not 2."),
            (
                32 * right,
                "32 times too long: attention has 32 layers, and 32 heads in each of them. Count both.",
            ),
        ],
        nudges=[
            "Which of the two grows with the sequence length, for each token?",
            "A token's FLOPs: 6 per weight that multiplies. Attention's are in this lesson's formulas.",
        ],
        hint="6 (Ψ - v d) = 12 l n h s. Solve for s.",
        because=(
            "Per token, weights take 6 (Ψ - v d) FLOPs at any length. Attention takes 12 l n h for each"
            " position that is looked at, so it overtakes where s is their ratio."
        ),
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
            (
                lambda layers, ratio: -(-layers // solution(layers, ratio)),
                "That is the number of groups. The size of one is asked for.",
            ),
            (
                lambda layers, ratio: min(-(-layers // c) + c * ratio for c in range(1, layers + 1)),
                "That is what is held at the worst moment. Return the size for which it is least.",
            ),
            (
                lambda layers, ratio: (layers / ratio) ** 0.5,
                "The root is the right idea, but a group has a whole number of layers, at least one.",
            ),
            (
                lambda layers, ratio: max(1, int((layers / ratio) ** 0.5)),
                (
                    "You round down. 64 layers of ratio 17 in groups of 2 hold 66 inputs, and in groups of"
                    " 1, 81."
                ),
            ),
            (
                lambda layers, ratio: max(1, layers // ratio),
                "Both terms are equal where c² is layers / ratio. You left out the root.",
            ),
        ],
        nudges=["What does a larger group save, and what does it cost while its backward pass runs?"],
        hint=(
            "With every c-th input kept: l/c inputs, and while a group runs backward c layers: minimise the"
            " sum."
        ),
        because=(
            "Groups of c layers keep l/c inputs, and one group's activations live at a time: c times ratio."
            " The sum of both is least near the root of l / ratio."
        ),
    )
