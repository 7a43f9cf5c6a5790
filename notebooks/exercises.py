"""The former address of `llmpar.exercises`, for lessons that still ask here."""

from llmpar.exercises import *  # noqa: F403
