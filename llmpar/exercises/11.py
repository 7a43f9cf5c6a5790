"""Exercises of lesson 11: which scheme for which machine, a slow network, and what a data sheet hides."""

from llmpar.config import preset
from llmpar.exercises import Exercise


def replicas(room_gib: float = 69.1) -> Exercise:
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
        ],
        hint="12 bytes per parameter: a float32 weight and two moments. fsdp cuts all three by 16.",
        tolerance=0.01,
    )


def schemes() -> Exercise:
    """Ask for the scheme of three situations: dp, fsdp or pp."""
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
        ],
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
        ],
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
        ],
        hint="C becomes 0.752 C, and β becomes 0.432 β.",
        tolerance=0.01,
    )
