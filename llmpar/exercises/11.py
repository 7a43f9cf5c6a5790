"""Exercises of lesson 11: which scheme for which machine, a slow network, and what a data sheet hides."""

from llmpar.config import preset
from llmpar.exercises import Exercise


def replicas() -> Exercise:
    """Ask how many GiB of state each device holds of Llama 3 8B, float32 weights and moments, as 16 replicas
    and fully sharded over 16."""
    state = 12 * preset("llama3-8b").num_params / 2**30
    right = {"dp=16": state, "fsdp=16": state / 16}
    return Exercise("core", right, tolerance=0.01)


def schemes() -> Exercise:
    """Ask for the scheme of three situations: dp, fsdp, tp or pp."""
    right = {"fits on a GPU": "dp", "fits in a node": "fsdp", "layers wider than a node's memory": "tp"}
    return Exercise("core", right)


def slow_network() -> Exercise:
    """Ask how many tokens a GPU needs before FSDP's gathers hide: 16 nodes of 4 A100s, 100 Gb/s a node."""
    return Exercise("stretch", 312e12 / (100e9 / 8 / 4), tolerance=0.01)


def data_sheet() -> Exercise:
    """Ask by which factor the threshold C/β changes when rates are those that are reached."""
    return Exercise("expert", 0.752 / 0.432, tolerance=0.01)
