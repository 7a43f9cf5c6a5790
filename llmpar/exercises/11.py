"""Exercises of lesson 11: which scheme for which machine, a slow network, and what a data sheet hides."""

from llmpar.config import preset
from llmpar.exercises import Exercise


def replicas() -> Exercise:
    """Ask how many GiB of state each device holds of Llama 3 8B, float32 weights and moments, as 16 replicas
    and fully sharded over 16."""
    state = 12 * preset("llama3-8b").num_params / 2**30
    right = {"dp=16": state, "fsdp=16": state / 16}
    return Exercise("core", right, tolerance=0.01)
