"""Exercises of lesson 11: which scheme for which machine, a slow network, and what a data sheet hides."""

from llmpar.config import preset
from llmpar.exercises import Exercise


def replicas() -> Exercise:
    """Ask how many GiB of state each device holds of Llama 3 8B, float32 weights and moments, as 16 replicas
    and fully sharded over 16."""
    state = 12 * preset("llama3-8b").num_params / 2**30
    right = {"dp=16": state, "fsdp=16": state / 16}
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (right | {"dp=16": state / 16}, "dp=16: replicas hold the same; nothing is cut."),
            (right | {"fsdp=16": state / 3 / 16 + 2 * state / 3}, "fsdp=16: the moments are cut as well."),
            (
                {name: value * 2**30 / 1e9 for name, value in right.items()},
                "Those are GB of 1e9 bytes; GiB of 2**30 are asked for.",
            ),
            (
                {name: value / 3 for name, value in right.items()},
                "Those are the weights; Adam has two moments more.",
            ),
            (
                {name: value * 2 / 3 for name, value in right.items()},
                "That is 8 bytes per parameter: two of the three. A weight and two moments are 12.",
            ),
            (
                {name: value * 4 / 3 for name, value in right.items()},
                "That is 16 bytes per parameter, with the gradient. Weights and moments are asked for.",
            ),
            (
                {name: value * 10 / 12 for name, value in right.items()},
                "That has weights of 16 bits. They are float32 here: 4 bytes, not 2.",
            ),
            (
                right | {"dp=16": state * 16},
                "dp=16: that is what all sixteen hold together. Each of them holds one copy.",
            ),
            (
                right | {"fsdp=16": state},
                "fsdp=16: that is what all hold together. Each of them has a sixteenth of it.",
            ),
            (
                right | {"fsdp=16": state / 3 + 2 * state / 3 / 16},
                "fsdp=16: that cuts the moments alone, as ZeRO-1 does. Weights are cut as well.",
            ),
            (
                right | {"fsdp=16": state / 8},
                "fsdp=16: that is cut over one node of eight. The axis spans both nodes.",
            ),
        ],
        nudges=["How many bytes has the state of one parameter, and which of the two axes cuts it?"],
        because=(
            "A float32 weight and two float32 moments are 12 bytes per parameter, 89.7 GiB in all. Replicas"
            " each hold all of it; fsdp leaves each device a sixteenth."
        ),
        hint="12 bytes per parameter: a float32 weight and two moments. fsdp cuts all three by 16.",
        tolerance=0.01,
    )


def schemes() -> Exercise:
    """Ask for the scheme of three situations: dp, fsdp, tp or pp."""
    right = {"fits on a GPU": "dp", "fits in a node": "fsdp", "layers wider than a node's memory": "tp"}
    return Exercise(
        level="core",
        solution=right,
        wrong=[
            (
                right | {"fits on a GPU": "fsdp"},
                "fits on a GPU: fsdp works too, and gathers weights that everybody could hold.",
            ),
            (
                right | {"fits in a node": "dp"},
                "fits in a node: but not on one GPU, and dp holds everything on each.",
            ),
            (
                right | {"fits in a node": "pp"},
                "fits in a node: a pipeline has a bubble; links inside a node are fast enough to gather.",
            ),
            (
                right | {"layers wider than a node's memory": "fsdp"},
                "layers wider than a node's memory: fsdp gathers a whole layer before it is used.",
            ),
            (
                right | {"fits on a GPU": "tp"},
                "fits on a GPU: tp sends activations in every layer. dp sends gradients once per step.",
            ),
            (
                right | {"fits on a GPU": "pp"},
                "fits on a GPU: a pipeline has a bubble. Replicas have none, and nothing forces a cut.",
            ),
            (
                right | {"fits in a node": "tp"},
                (
                    "fits in a node: tp would do, but each layer waits for its all-reduces. Gathers of"
                    " weights can run ahead."
                ),
            ),
            (
                right | {"layers wider than a node's memory": "pp"},
                "layers wider than a node's memory: a stage holds whole layers. One layer must be cut.",
            ),
            (
                right | {"layers wider than a node's memory": "dp"},
                "layers wider than a node's memory: dp cuts no weight. Each replica has every layer whole.",
            ),
        ],
        nudges=["What is cut by each of the four: the batch, the state, the stack or a layer?"],
        because=(
            "dp sums gradients and cuts no state, so it needs state that fits. fsdp cuts the state, but"
            " gathers a layer to use it. Only tp computes with slices of one layer."
        ),
        hint="Cut as little as you must: the batch, then the state, then each layer.",
    )


def slow_network() -> Exercise:
    """Ask how many tokens a GPU needs before FSDP's gathers hide: 16 nodes of 4 A100s, 100 Gb/s a node."""
    right = 312e12 / (100e9 / 8 / 4)
    return Exercise(
        level="stretch",
        solution=right,
        wrong=[
            (312e12 / (100e9 / 8), "The node's 12.5 GB/s are shared by its four GPUs."),
            (312e12 / 100e9, "100 Gb/s are bits; a byte has eight. And four GPUs share them."),
            (312e12 / (100e9 / 4), "Those are bits of a quarter: a byte has eight."),
            (312e12 / 300e9, "That is NVLink inside the node. The gathers cross nodes."),
            (
                4 * right,
                (
                    "Four times too many. The four GPUs of a node share its 12.5 GB/s; other nodes have"
                    " their own. Count one GPU's tokens."
                ),
            ),
            (16 * right, "Not all 64 GPUs share 100 Gb/s: each node has its own, for four GPUs."),
            (64 * right, "Those are the tokens of all 64 GPUs. One GPU's are asked for."),
            (989.4e12 / (100e9 / 8 / 4), "That is an H100's peak. An A100 has 312e12 FLOPs per second."),
            (312 / (100 / 8 / 4), "TFLOP are 1e12 and GB are 1e9: a factor of 1,000 is missing."),
        ],
        nudges=[
            "How many bytes per second leave one GPU, when four of them share the node's port?",
            "Is the network's rate in bits or in bytes?",
        ],
        because=(
            "100 Gb/s are 12.5 GB/s, and each of four GPUs has a quarter: 3.125 GB/s. Gathers hide where a"
            " GPU has C/β tokens, and this β is small."
        ),
        hint="C/β: the GPU's FLOPs per second (312e12) over the bytes per second that leave it.",
        tolerance=0.01,
    )


def data_sheet() -> Exercise:
    """Ask by which factor the threshold C/β changes when rates are those that are reached."""
    right = 0.752 / 0.432
    return Exercise(
        level="expert",
        solution=right,
        wrong=[
            (0.432 / 0.752, "Upside down: slower links raise the threshold, slower products lower it."),
            (1 / 0.432, "The products reach less than their peak, too."),
            (0.752, "The links reach less than their rate, too."),
            (0.752 * 0.432, "C is above the line, β below it."),
            (
                1 / (0.752 * 0.432),
                "Slower products take longer, so more hides behind them. Multiply by 0.752.",
            ),
            (1 / 0.752, "C is above the line: multiply by 0.752. The links change β as well."),
            (0.432, "β is below the line: divide by 0.432. The products change C as well."),
            (1, "The two shares differ: the links lose more than the products do."),
            (right - 1, "That is by how much it rises. The factor is one more."),
            (100 * right, "Those are per cent. A factor is asked for."),
        ],
        nudges=["Which of the two is above the line in C/β, and which loses more?"],
        because=(
            "C shrinks to 0.752 and β to 0.432 of the data sheet's value. The links lose more, so the"
            " threshold rises by 0.752 / 0.432: a GPU needs more tokens."
        ),
        hint="C becomes 0.752 C, and β becomes 0.432 β.",
        tolerance=0.01,
    )
